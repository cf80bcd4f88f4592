# SPDX-License-Identifier: Apache-2.0
"""The bench of DDTREE: what its trees accept, and what a step costs, beside the chain of DFLASH and no speculation."""
