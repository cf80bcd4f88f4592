# SPDX-License-Identifier: Apache-2.0
"""The capture lint: calls that a CUDA graph or a step without host waits can't hold, told from the source."""
