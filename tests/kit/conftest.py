# SPDX-License-Identifier: Apache-2.0
"""transformers imports torchvision where it is installed; beside a CPU build of torch that needs preparing."""

from __future__ import annotations

import cpu_sglang

cpu_sglang.prepare()
