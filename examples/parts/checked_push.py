"""New weights into an engine, bucket by bucket, and a comparison of every bit."""

from selfplay.config import ScratchConfig
from selfplay.engines.hf import HFEngine
from selfplay.engines.weights import Weights
from selfplay.model.policy import scratch_model

first, trained = (scratch_model(ScratchConfig(width=32), vocab_size=128, seed=n) for n in range(2))
engine = HFEngine(first)
before = engine.compare(Weights(trained, engine.dtype))
engine.load(Weights(trained, engine.dtype), version=1)
after = engine.compare(Weights(trained, engine.dtype))
print(before.num_different > 0, after.num_different, engine.version)
# True 0 1
