# SPDX-License-Identifier: Apache-2.0
"""Host time of the calls of a verify step."""
