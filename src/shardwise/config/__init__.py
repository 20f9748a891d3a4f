"""The configuration of a run, which is checked before anything starts."""

from .build import Data, build_data, build_loss_scale, build_metrics, build_model, build_optimizer, build_plan
from .callbacks import build_callbacks, check_callbacks
from .config import Config, given_values, load_config, load_model_config
from .hardware import MORE_RANKS, Hardware
from .sections import CheckpointConfig, DataConfig, ModelConfig, OptimizerConfig, ParallelConfig, TrainConfig

__all__ = [
    "CheckpointConfig",
    "Config",
    "Data",
    "DataConfig",
    "MORE_RANKS",
    "Hardware",
    "ModelConfig",
    "OptimizerConfig",
    "ParallelConfig",
    "TrainConfig",
    "build_callbacks",
    "build_data",
    "build_loss_scale",
    "build_metrics",
    "build_model",
    "build_optimizer",
    "build_plan",
    "check_callbacks",
    "given_values",
    "load_config",
    "load_model_config",
]
