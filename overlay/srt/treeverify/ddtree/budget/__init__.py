# SPDX-License-Identifier: Apache-2.0
"""Trees as large as they pay, step by step (TREEVERIFY_DDTREE_ADAPT=1).

More nodes never accept less, so acceptance alone asks for the largest tree; what counts is tokens over time (CaDDTree,
arXiv 2606.01813). Here the width of a step is one of a few, each captured beforehand:

    widths      which they are
    graphs      CUDA graphs of each, and the switch
    curve       what a target pass of each costs, by batch and context
    measure     that curve, timed on the captured graphs at start-up
    rest        what the rest of a step costs, timed while serving
    acceptance  tokens a step at each width: what the drafter promises, corrected by what the target took
    choose      the width of the most tokens a second
    controller  one step after the other
    start       all of it for a server
"""
