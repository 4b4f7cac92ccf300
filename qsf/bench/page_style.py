"""What the page of a benchmark adds to the style of the quality report."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

# Where the time of a token goes: greys around the layers, blue attention, brown feed-forward, red
# and yellow what streaming costs, green what Python does.
_PARTS_LIGHT = (
    "#b3bac3", "#8b949f", "#1f4e8c", "#3f7cc4", "#8ab4e6", "#a04a1c", "#d98a55", "#8450a0",
    "#c23b3b", "#e0a526", "#2f8a5b", "#85c4a1", "#d3d7dc",
)  # fmt: skip
_PARTS_DARK = (
    "#6c747e", "#98a1ad", "#3d6fb4", "#6ea3e6", "#a9caf2", "#b5602f", "#e8a273", "#b98ad4",
    "#e06767", "#e3b84a", "#4fa87a", "#93d3b1", "#4a515a",
)  # fmt: skip
N_PART_COLOURS = len(_PARTS_LIGHT)


def _variables(colours: tuple[str, ...]) -> str:
    return "".join(f"--p{idx}:{colour};" for idx, colour in enumerate(colours))


_CLASSES = "".join(
    f".p{idx}{{fill:var(--p{idx});background:var(--p{idx})}}" for idx in range(N_PART_COLOURS)
) + "".join(f".s{idx}{{stroke:var(--c{idx})}}" for idx in range(6))

PAGE_STYLE = f"""
:root{{{_variables(_PARTS_LIGHT)}}}
@media (prefers-color-scheme:dark){{:root{{{_variables(_PARTS_DARK)}}}}}
{_CLASSES}
h3{{font-size:.95rem;font-weight:600;margin:0 0 8px;overflow-wrap:anywhere}}
h3 span{{font-weight:400;color:var(--soft)}}
.panels{{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(100%,340px),1fr));
gap:26px 24px}}
.panels figure{{margin:0;min-width:0}}
.panels svg.plot{{max-width:520px;overflow:visible}}
.grid{{stroke:var(--line);stroke-width:1;fill:none}}
.base{{stroke:var(--soft);stroke-width:1;fill:none}}
.roof{{stroke:var(--soft);stroke-width:1.5;stroke-dasharray:5 4;fill:none}}
.join{{fill:none;stroke-width:1.6;opacity:.45}}
.err{{fill:none;stroke-width:1.4}}
.hit{{fill:transparent}}
.pt path{{stroke:var(--card);stroke-width:1.2}}
.ink{{fill:var(--soft)}}
.keys .key{{display:inline-block;width:14px;height:14px;margin-right:.45em;vertical-align:-2px}}
.stack rect{{stroke:var(--card);stroke-width:1;vector-effect:non-scaling-stroke}}
.times{{margin:0 0 20px}}
.times .stack{{height:22px;margin:4px 0 3px}}
.times p{{margin:0;font-size:.9rem;display:flex;flex-wrap:wrap;justify-content:space-between;
gap:0 16px}}
.times li{{list-style:none;margin:0 0 13px}}
ul.times{{padding:0}}
.ratios{{display:grid;grid-template-columns:minmax(0,max-content) minmax(90px,1fr) max-content;
gap:6px 16px;align-items:center;margin:0;font-size:.9rem}}
.ratios dt,.ratios dd{{margin:0;overflow-wrap:anywhere}}
.ratios .v{{text-align:right;white-space:nowrap}}
.range{{width:100%;height:16px}}
.range .one{{fill:var(--soft)}}
.says{{margin:0;padding-left:1.2em;font-size:.95rem}}
.table+.says{{margin-top:16px}}
.says li{{margin:0 0 6px;overflow-wrap:anywhere}}
.limits{{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,230px),1fr));
gap:20px 36px}}
.figures{{grid-template-columns:repeat(auto-fit,minmax(250px,1fr))}}
.panels .table{{margin:0}}
.panels .table :is(th,td){{padding:5px 7px;font-size:.82rem}}
.panels .table tr>:last-child{{padding-right:2px}}
.limits .v .soft{{display:none}}
.panels .table tr>:first-child{{padding-left:0}}
.lo{{paint-order:stroke;stroke:var(--card);stroke-width:3;stroke-linejoin:round}}
@media (max-width:560px){{
.figures{{grid-template-columns:1fr}}
svg.plot text{{font-size:13px}}
.table:not(.tall) tbody th{{white-space:normal;min-width:8.5em}}
.ratios{{grid-template-columns:1fr max-content;gap:3px 12px}}
.ratios dt{{grid-column:1/-1;margin-top:7px}}
}}
"""
