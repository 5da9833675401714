"""Hand-sized collaborations: a hidden number, a short text, a function."""

from dataclasses import replace

from dialop.collab.game import CollabGame
from dialop.collab.task import CollabInstance, CollabOptions

FULL, BRIEF = CollabOptions(), CollabOptions(brief=True)
NUMBER = CollabInstance(
    key="number",
    task="math",
    request="Add 3 to my number.",
    goal="Add 3 to my number. My number is 5.",
    target="8",
)
LETTER = CollabInstance(
    key="letter",
    task="writing",
    request="Write a note to my neighbour.",
    goal="Write a note to my neighbour. Her name is Ines. The parcel is in the shed.",
    target="Dear Ines, your parcel is in the shed.",
)
DOUBLE = CollabInstance(
    key="double",
    task="code",
    request="Write a function for me.",
    goal="The function is called double. It takes a number. It returns twice the number.",
    target="def double(x):\n    return 2 * x",
    tests="assert double(4) == 8\nassert double(-1) == -2",
    entry_point="double",
)

# How chat models write a thought before what they say; the second's prompt has opened it.
THOUGHTS = (
    *("<think>{}</think>\n\n", "{}\n</think>", "<thinking>\n{}</thinking>"),
    *("<THOUGHT>{}</THOUGHT>", "<reasoning>{}</reasoning>\n", "[THINK]{}[/THINK]"),
    *("<seed:think>{}</seed:think>", "<|START_THINKING|>{}<|END_THINKING|>", "\n◁think▷{}◁/think▷"),
    "analysisWell, {}assistantfinal",
    "<|channel|>analysis<|message|>{}<|end|><|start|>assistant<|channel|>final<|message|>",
)


def talked(
    instance: CollabInstance, *texts: str, options: CollabOptions = FULL, interactivity: float = 0.0
) -> CollabGame:
    """A game after these moves, the assistant's first, all legal."""
    game = CollabGame(instance, replace(options, interactivity=interactivity))
    for text in texts:
        seat = game.seat_to_move
        assert seat is not None and game.step(seat, text).error is None, text
    return game
