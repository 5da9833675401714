"""Tic-tac-toe. Each player reads the board before its move; perfect play never loses.

python train.py --config examples/tictactoe/tictactoe.yaml
"""

from dataclasses import dataclass
from functools import cache, partial

from dialop.game import Outcome, PlayerError
from dialop.kit import NoOptions
from dialop.turns import TurnGame

ROLES, SQUARES, EMPTY = ("X", "O"), "123456789", "." * 9
LINES = [(0, 1, 2), (3, 4, 5), (6, 7, 8), (0, 3, 6), (1, 4, 7), (2, 5, 8), (0, 4, 8), (2, 4, 6)]


@dataclass(frozen=True)
class Instance:
    key: str


class TicTacToe(TurnGame):
    num_seats, tags = 2, ("move",)
    instance_type, options_type = Instance, NoOptions
    rules = "Tic-tac-toe. Write [move] SQUARE, 1 to 9. Three in a row win."
    board = EMPTY

    def sees(self, seat):
        return f"you are {ROLES[seat]}"

    def legal_moves(self):
        return tuple(f"[move] {SQUARES[square]}" for square in free(self.board))

    def play(self, seat, tag, content):
        if content not in SQUARES or len(content) != 1:
            raise PlayerError("no_square", "name a square, 1 to 9")
        square = SQUARES.index(content)
        if self.board[square] != ".":
            raise PlayerError("taken", "that square is taken")
        self.board = after(self.board, square)
        self.show(1 - seat, shown(self.board))
        return None if is_over(self.board) else 1 - seat

    def outcome(self):
        paid = winner(self.board)
        return result(paid, over=is_over(self.board))

    def outcome_of_forfeit(self, seat):
        return result(-1 if seat == 0 else 1, over=False)

    def measures(self, seats):
        """`lost` and `won` games of these seats, a mean over the seats."""
        paid = [winner(self.board) * (1 if seat == 0 else -1) for seat in seats]
        share = 1 / max(1, len(paid))
        return {"lost": share * paid.count(-1), "won": share * paid.count(1)}


def shown(board):
    return " ".join(board)


def free(board):
    return [square for square in range(9) if board[square] == "."]


def after(board, square):
    mark = ROLES[board.count("X") - board.count("O")]
    return board[:square] + mark + board[square + 1 :]


def winner(board):
    """1 if X has three in a row, -1 if O has, else 0."""
    for line in LINES:
        marks = {board[square] for square in line}
        if len(marks) == 1 and marks != {"."}:
            return 1 if marks == {"X"} else -1
    return 0


def is_over(board):
    return bool(winner(board)) or "." not in board


def result(paid, *, over):
    scores = ((1 + paid) / 2, (1 - paid) / 2)
    return Outcome(
        over=over,
        agreed=over,
        score=float(paid),
        score_norm=scores[0],
        rewards=(float(paid), float(-paid)),
        seat_scores=scores,
    )


@cache
def value(board):
    """What X is paid if both play perfectly from here."""
    if is_over(board):
        return winner(board)
    best = max if board.count("X") == board.count("O") else min
    return best(value(after(board, square)) for square in free(board))


def best_squares(board):
    return [square for square in free(board) if value(after(board, square)) == value(board)]


def generate_instance(options, *, seed, index):
    return Instance(f"{seed}-{index}")


def player(slip, view, draw):
    """Any of the best moves, and a share `slip` of random ones."""
    board = EMPTY
    for _, _, content in view.log:
        board = after(board, SQUARES.index(content))
    squares = free(board) if draw.random() < slip else best_squares(board)
    return f"[move] {SQUARES[draw.choice(squares)]}"


def phrases(instances, options, *, split_lines):
    return [f"[move] {square}" for square in SQUARES]


SCRIPTS = {
    "perfect": partial(player, 0.0),
    "errs": partial(player, 0.2),
    "random": partial(player, 1.0),
}
new_game, restore = TicTacToe, TicTacToe.from_state
