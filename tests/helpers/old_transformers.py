"""Marks of tests of what older versions of transformers, with which this package still works, do not do."""

import pytest
import transformers
from packaging.version import Version

installed = Version(transformers.__version__)

from_pretrained_loads = pytest.mark.skipif(
    installed < Version("5.9.0"),
    reason="from_pretrained of transformers 5.5.0, 5.8.0 and 5.8.1 was tried and reads no packed model",
)
