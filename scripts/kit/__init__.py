# SPDX-License-Identifier: Apache-2.0
"""The evidence kit: trains a small target of Kimi K2's attention geometry and a DFlash drafter for it."""
