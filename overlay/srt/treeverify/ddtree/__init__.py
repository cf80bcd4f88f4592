# SPDX-License-Identifier: Apache-2.0
"""DDTREE (arXiv 2604.12989): draft trees from a DFlash drafter, built, verified and walked on the device."""
