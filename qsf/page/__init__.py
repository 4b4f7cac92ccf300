"""Web pages that need nothing else: no script, font or network. For quality reports and benchmarks.

`html` is the frame of a page and its sections, `svg` heat maps and bars, `plots` the xy-plot,
`style` the colours. All texts are escaped there.
"""
# SPDX-License-Identifier: Apache-2.0
