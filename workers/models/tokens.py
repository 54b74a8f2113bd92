"""Five pieces of text: the built-in model `tokens`, and the smallest example of a model that streams by steps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from workers.model import Array, Last, TensorSpec

PIECES = ("Tensors ", "stream ", "one ", "by ", "one.")


class Tokens:
    """No inputs; "Tensors stream one by one.", a word a piece."""

    inputs: Sequence[TensorSpec] = ()
    outputs: Sequence[TensorSpec] = ()

    def load(self) -> None: ...

    def start(self, request: Mapping[str, Array]) -> Iterator[str | Last]:
        return iter((*PIECES[:-1], Last(PIECES[-1])))

    def step(self, states: Sequence[Iterator[str | Last]]) -> Sequence[str | Last]:
        return [next(state) for state in states]
