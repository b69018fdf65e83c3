import sys
from pathlib import Path

# netmem_offload_model.py is shared by the tests of this folder; importlib mode does not put the folder on the path.
sys.path.insert(0, str(Path(__file__).parent))
