"""Saves the state of a run without loss, resumes it exactly, exports the policy."""

from selfplay.checkpoint.repair import repair_folder
from selfplay.checkpoint.saving import (
    OpenCheckpoint,
    begin_checkpoint,
    checkpoints,
    export_atomically,
    export_once,
    finish,
    keep_newest,
    policies,
    resume,
    save_checkpoint,
)

__all__ = [
    "OpenCheckpoint",
    "begin_checkpoint",
    "checkpoints",
    "export_atomically",
    "export_once",
    "finish",
    "keep_newest",
    "policies",
    "repair_folder",
    "resume",
    "save_checkpoint",
]
