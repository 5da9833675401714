"""A hand-sized mediation instance and helpers that its tests share."""

from dialop.logged import Rules
from dialop.mediation.records import Event, Flight, MediationInstance, User


def at(hour: int, minute: int = 0) -> int:
    return 60 * hour + minute


# One day. Arrivals: 11:00, 16:00 and 14:30 for user 0; 12:30 and 16:30 for user 1. The weight of
# the arrival gap is 3, so a whole hour of gap costs each user a point.
#   pair    user 0           user 1           gap   score
#   (0, 0)  -4 + 5 =   1     -2 + 0 =  -2     1 h     -3   the best
#   (0, 1)  -4 + 5 =   1     -9 - 2 = -11     5 h    -20
#   (1, 0)  -7 - 5 = -12     -2 + 0 =  -2     3 h    -20
#   (1, 1)  -7 - 5 = -12     -9 - 2 = -11     0 h    -23
#   (2, 0) -11 + 0 = -11     -2 + 0 =  -2     2 h    -17
#   (2, 1) -11 + 0 = -11     -9 - 2 = -11     2 h    -26   the worst
SMALL = MediationInstance(
    key="hand/0",
    users=(
        User(
            events=(Event(at(10), at(12), 4, shared=True), Event(at(14), at(15), 7, shared=False)),
            flights=(
                Flight("Delta", at(9, 30), at(11), 100),
                Flight("United", at(14, 30), at(16), 300),
                Flight("Alaska", at(11, 30), at(14, 30), 200),
            ),
            mean_price=200,
            price_pref=10,
        ),
        User(
            events=(Event(at(9), at(10), 2, shared=True), Event(at(15), at(19), 9, shared=False)),
            flights=(
                Flight("JetBlue", at(9, 30), at(12, 30), 100),
                Flight("American", at(14), at(16, 30), 150),
            ),
            mean_price=100,
            price_pref=4,
        ),
    ),
    arrival_pref=3,
    best=-3,
    worst=-26,
    alone=-3,
)
SCORES = {(0, 0): -3, (0, 1): -20, (1, 0): -20, (1, 1): -23, (2, 0): -17, (2, 1): -26}
FULL = Rules()
BRIEF = Rules(brief=True)
SILENT = Rules(messages=False)


def proposal(first: int, second: int) -> str:
    return f"all: [propose] user 0: id {first}, user 1: id {second}"
