"""Made-up responses, as the exports in ``data`` have them: two optimizer steps of four, two of each prompt."""

from types import SimpleNamespace


def _response(row: int) -> SimpleNamespace:
    """Values are multiples of 1/64, which float32 and JSON hold exactly; one token of some was not trained on."""
    places = range(3 + row % 3)
    trainer = [-(place + 1) / 8 - row / 64 for place in places]
    return SimpleNamespace(
        row=row,
        prompt=[3, 4, 5 + row // 2],
        ids=[100 * row + place for place in places],
        mask=[int(place != 1 or row % 4 != 1) for place in places],
        advantages=[(row - 3) / 4 for _ in places],
        logprobs=trainer,
        rollout_logprobs=[value + (place % 3 - 1) / 16 for place, value in enumerate(trainer)],
        ref_logprobs=[value - 1 / 32 for value in trainer],
        entropies=[(place + row) / 4 for place in places],
        reward=float(row % 2),
    )


RESPONSES = [_response(row) for row in range(8)]
