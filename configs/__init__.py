"""The typed schema of a run, how it is read, and the presets (`*.yaml` in this folder)."""

from .checks import check as check
from .fields import FieldDoc as FieldDoc
from .fields import describe as describe
from .fields import describe_schema as describe_schema
from .live import LIVE as LIVE
from .live import LiveChange as LiveChange
from .live import changed_live as changed_live
from .live import differences as differences
from .loading import RUN_CONFIG as RUN_CONFIG
from .loading import changed as changed
from .loading import dump as dump
from .loading import load as load
from .loading import presets as presets
from .loading import run_config as run_config
from .schema import Config as Config
from .sft import SftConfig as SftConfig
