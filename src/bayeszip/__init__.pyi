"""What type checkers and editors see of the public surface; `__init__.py` imports it when it is used."""

from bayeszip import codec as codec
from bayeszip import data as data
from bayeszip import graph as graph
from bayeszip import models as models
from bayeszip import variational as variational
from bayeszip.compressing import compress as compress
from bayeszip.compressor import Compressor as Compressor
from bayeszip.compressor.lightning import LightningCallback as LightningCallback
from bayeszip.compressor.transformers import TrainerCallback as TrainerCallback
from bayeszip.errors import BayeszipError as BayeszipError
from bayeszip.errors import CheckpointError as CheckpointError
from bayeszip.errors import DataError as DataError
from bayeszip.errors import FormatError as FormatError
from bayeszip.errors import Interrupted as Interrupted
from bayeszip.errors import ModelError as ModelError
from bayeszip.errors import OutputError as OutputError
from bayeszip.errors import RecipeError as RecipeError
from bayeszip.errors import TargetError as TargetError
from bayeszip.errors import TrainingError as TrainingError
from bayeszip.fitting import EpochStats as EpochStats
from bayeszip.fitting import ResidentBatches as ResidentBatches
from bayeszip.fitting import Watcher as Watcher
from bayeszip.fitting import evaluate as evaluate
from bayeszip.fitting.keeper import Checkpointing as Checkpointing
from bayeszip.limits import LimitExceeded as LimitExceeded
from bayeszip.limits import Limits as Limits
from bayeszip.loading import export as export
from bayeszip.loading import load as load
from bayeszip.loading import verify as verify
from bayeszip.packing import pack as pack
from bayeszip.previewing import preview as preview
from bayeszip.recipe import Recipe as Recipe
from bayeszip.recipe import recipe as recipe
from bayeszip.result import Result as Result
from bayeszip.tensors import CompressedModel as CompressedModel
from bayeszip.tensors import LogGrid as LogGrid
from bayeszip.tensors import QuantizedTensor as QuantizedTensor
from bayeszip.tensors import RawTensor as RawTensor
from bayeszip.tensors import UniformGrid as UniformGrid

__version__: str
