"""One seat's exact tokens: what it read and what it sampled, also after a fork."""

from selfplay.chat.transcript import Transcript

seat = Transcript()
seat.observe([1, 17, 4])  # the prompt's ids
seat.act([23, 2], logprobs=[-0.1, -0.5])  # sampled ids, with the engine's log-probs
other = seat.fork()  # the same game so far
other.observe([31])
other.act([8, 2], logprobs=[-1.2, -0.1])
print(seat.mask, other.mask, other.context())
# [0, 0, 0, 1, 1] [0, 0, 0, 1, 1, 0, 1, 1] [1, 17, 4, 23, 2, 31, 8, 2]
