# SPDX-License-Identifier: Apache-2.0
"""The patch tool: makes a treeverify tree out of a pinned SGLang release, and back."""
