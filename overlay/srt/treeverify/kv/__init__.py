# SPDX-License-Identifier: Apache-2.0
"""Moving KV rows between slots: after a verify step, and to make a request's slots contiguous."""
