# SPDX-License-Identifier: Apache-2.0
"""MLA verify attention: ops, their reference, and the hooks of SGLang's attention backends."""
