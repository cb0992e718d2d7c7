"""Dispatch and combine between real processes, bit for bit as the oracle says."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from ep.cases import Case, expert_output, inputs, run_case
from harness import World

from expertwire.ep import reference
