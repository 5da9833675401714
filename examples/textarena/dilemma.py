"""TextArena's iterated prisoner's dilemma with scripted players, so that a run can start from them.

python train.py --config examples/textarena/dilemma.yaml out=runs/dilemma
"""

from selfplay.extras.textarena import module_of

globals().update(vars(module_of("IteratedPrisonersDilemma-v0")))


def chooses(view):
    """Whether the seat must choose: a round is a text of each seat, then a choice of each."""
    return (len(view.texts) - 1) % 4 > 1


def keeps(view, draw):
    """Promise something, and choose it."""
    word = "cooperate" if view.seat + (len(view.texts) - 1) // 4 & 1 else "defect"
    return f"[{word}]" if chooses(view) else f"I will {word}."


def breaks(view, draw):
    """Promise to cooperate, and defect."""
    return "[defect]" if chooses(view) else "I will cooperate."


SCRIPTS = {"keeps": keeps, "breaks": breaks}
