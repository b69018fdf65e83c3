"""A trainer with hooks to override, as Hugging Face's Trainer has them, offloads activations with three lines.

The trainer below has the shape of transformers.Trainer (which is not installed here): `compute_loss`, `training_step`,
callbacks, gradient accumulation. Everything that concerns offloading is in `OffloadingTrainer`.
Offloading is lossless: after three steps the weights are the same bits with and without it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from gemworks.netmem import OffloadEngine, PinnedArena
from torch import Tensor, nn

Inputs = dict[str, Tensor]


class Trainer:
    """Somebody's training loop."""

    def __init__(
        self,
        model: nn.Module,
        *,
        gradient_accumulation_steps: int = 1,
        lr: float = 1e-3,
        callbacks: Iterable[Callable[[int, float], None]] = (),
    ) -> None:
        self.model = model
        self.accumulation = gradient_accumulation_steps
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
        self.callbacks = list(callbacks)

    def compute_loss(self, model: nn.Module, inputs: Inputs) -> Tensor:
        return nn.functional.cross_entropy(model(inputs["features"]), inputs["labels"])

    def training_step(self, model: nn.Module, inputs: Inputs) -> Tensor:
        loss = self.compute_loss(model, inputs) / self.accumulation
        loss.backward()
        return loss.detach()

    def train(self, batches: Iterable[Inputs]) -> None:
        total = 0.0
        for i, inputs in enumerate(batches, 1):
            total += self.training_step(self.model, inputs).item()
            if i % self.accumulation == 0:
                self.optimizer.step()
                self.optimizer.zero_grad()
                for callback in self.callbacks:
                    callback(i // self.accumulation, total)
                total = 0.0


class OffloadingTrainer(Trainer):
    """The same with activations in pinned host memory between forward and backward.

    Args:
        host_bytes: pinned memory for activations.
        device: "cpu" runs the same state machine with plain copies; None is the current GPU.
    """

    def __init__(self, model: nn.Module, *, host_bytes: int, device: str | None = None, **more: object) -> None:
        super().__init__(model, **more)  # pyright: ignore[reportArgumentType]
        self.engine = OffloadEngine(PinnedArena(host_bytes), device=device, min_bytes=1 << 12)

    def compute_loss(self, model: nn.Module, inputs: Inputs) -> Tensor:
        with self.engine.saving(model):
            return super().compute_loss(model, inputs)


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*[layer for _ in range(3) for layer in (nn.Linear(128, 128), nn.GELU())], nn.Linear(128, 4))


def main() -> None:
    generator = torch.Generator().manual_seed(1)
    batches = [
        {
            "features": torch.randn(64, 128, generator=generator),
            "labels": torch.randint(0, 4, (64,), generator=generator),
        }
        for _ in range(6)
    ]
    device = "cuda" if torch.cuda.is_available() else "cpu"
    batches = [{name: values.to(device) for name, values in inputs.items()} for inputs in batches]
    plain, offloading = make_model().to(device), make_model().to(device)
    Trainer(plain, gradient_accumulation_steps=2).train(batches)
    trainer = OffloadingTrainer(
        offloading,
        host_bytes=8 << 20,
        device=None if device == "cuda" else device,
        gradient_accumulation_steps=2,
        callbacks=[lambda step, loss: print(f"step {step}: loss {loss:.4f}")],
    )
    trainer.train(batches)
    stats = trainer.engine.stats()
    print(f"{stats}")
    for name, weight in plain.state_dict().items():
        assert torch.equal(weight, offloading.state_dict()[name]), name
    print(f"on {device}: the same bits as without offloading")


if __name__ == "__main__":
    main()
