"""What runs in vLLM's own process, by the classes that vLLM lets an engine name.

vLLM imports this module in that process, and the trainer does when an engine starts.
"""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from multiprocessing import parent_process
from typing import Any

from vllm.distributed.weight_transfer import WeightTransferEngine, WeightTransferEngineFactory
from vllm.distributed.weight_transfer.base import WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)
from vllm.platforms import current_platform
from vllm.v1.executor.uniproc_executor import UniProcExecutor

from selfplay.engines.sglang import buckets
from selfplay.engines.sglang.processes import die_with_parent

BACKEND = "selfplay"  # the name of `Receiver` in vLLM's settings


class TrainersExecutor(UniProcExecutor):
    """vLLM's executor of one process, which ends with the trainer.

    vLLM's engine process does not notice that its trainer was killed: it would wait for requests
    forever, with the GPU's memory.
    """

    def _init_executor(self) -> None:
        trainer = parent_process()
        assert trainer is not None and trainer.pid is not None
        die_with_parent(trainer.pid)
        if current_platform.is_cpu():
            _keep_weights()
        super()._init_executor()


def _keep_weights() -> None:
    """On a CPU vLLM packs linear layers and drops their weights, which nothing could be compared
    with. Without oneDNN it computes with the weights themselves, as torch does."""
    from vllm import _custom_ops

    _custom_ops._supports_onednn = False


@dataclass
class Update(WeightTransferUpdateInfo):
    """A bucket's message (`buckets.message`), pickled."""

    message: bytes


class Receiver(WeightTransferEngine[WeightTransferInitInfo, Update]):
    """Takes the trainer's weights in vLLM's `update_weights`, bucket by bucket.

    vLLM makes one for its model at the start. Between `start_weight_update` and
    `finish_weight_update` its loaders keep the weights of a layer until all of them are there, then
    process the layer as after a load from a file (merged, padded, packed) and copy the result over
    the old one, so CUDA graphs stay valid.
    """

    init_info_cls, update_info_cls = WeightTransferInitInfo, Update

    def init_transfer_engine(self, init_info: WeightTransferInitInfo) -> None:
        """Does nothing: a message has all that it needs."""

    def start_weight_update(self) -> None:
        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: Update) -> None:
        buckets.read(self.model, pickle.loads(update_info.message))

    def finish_weight_update(self) -> None:
        finalize_layerwise_reload(self.model, self.model_config)

    def shutdown(self) -> None:
        """Does nothing: there is no connection."""

    @staticmethod
    def trainer_send_weights(iterator: Any, trainer_args: Any) -> None:
        """Not used: `VLLMEngine.load` sends them."""
        raise NotImplementedError


class Comparison:
    """Methods that vLLM adds to its worker (`worker_extension_cls`), for `collective_rpc`."""

    model_runner: Any

    def compare_bucket(self, message: bytes) -> None:
        """Compare a bucket's message with the model's weights bit for bit, without writing; the
        counts go to the message's folder (`buckets.read`)."""
        buckets.read(self.model_runner.get_model(), pickle.loads(message))


WeightTransferEngineFactory.register_engine(BACKEND, Receiver)
