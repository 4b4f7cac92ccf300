"""The style of all pages: light and dark, phone and desk, paper."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

# c: categories, e: errors, b: bits.
# Text on a shade keeps a contrast of at least 4.5 in both schemes.
_LIGHT = """
--page:#faf9f6;--card:#fff;--ink:#1c1d1f;--soft:#5b6067;--line:#e4e1da;--track:#edeae3;
--on-low:#1c1d1f;--on-high:#fff;
--c0:#2f64ad;--c1:#c4622d;--c2:#2f8a5b;--c3:#8450a0;--c4:#a98619;--c5:#6b7480;
--e0:#fdf3e3;--e1:#fbe4c4;--e2:#f8d1a0;--e3:#f4b97a;--e4:#ec9f58;--e5:#df853e;--e6:#b5521b;
--e7:#964013;--e8:#722c0c;
--b0:#eef4fb;--b1:#dae8f6;--b2:#c2d8ef;--b3:#a6c5e7;--b4:#85afdb;--b5:#6a9bd0;--b6:#3a72ae;
--b7:#275a93;--b8:#164273;
"""
_DARK = """
--page:#131518;--card:#1b1e23;--ink:#e9e9ea;--soft:#a4a9b1;--line:#30343b;--track:#2a2e35;
--on-low:#f3f3f3;--on-high:#15161a;
--c0:#6ea3e6;--c1:#e88b57;--c2:#5fba8a;--c3:#b98ad4;--c4:#d3b34c;--c5:#98a1ad;
--e0:#2b221b;--e1:#3d2c1e;--e2:#533820;--e3:#6a4521;--e4:#825023;--e5:#975b25;--e6:#cf8138;
--e7:#e99e52;--e8:#ffc68a;
--b0:#1b232d;--b1:#202f40;--b2:#263d56;--b3:#2c4b6c;--b4:#335a82;--b5:#3a6893;--b6:#5a92c8;
--b7:#7aade0;--b8:#a9d0f3;
"""

_SHADES = "".join(
    f".{palette}{idx}{{fill:var(--{palette}{idx});background:var(--{palette}{idx})}}"
    for palette, n in (("c", 6), ("e", 9), ("b", 9))
    for idx in range(n)
)

STYLE = f"""
:root{{color-scheme:light dark;{_LIGHT}}}
@media (prefers-color-scheme:dark){{:root{{{_DARK}}}}}
*{{box-sizing:border-box}}
html{{-webkit-text-size-adjust:100%}}
body{{margin:0;background:var(--page);color:var(--ink);
font:16px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,"Noto Sans",sans-serif;
font-variant-numeric:tabular-nums}}
main,header,footer{{max-width:960px;margin:0 auto;padding:0 20px}}
header{{padding-top:40px}}
h1{{font-size:clamp(1.5rem,5vw,2.1rem);line-height:1.2;letter-spacing:-.015em;margin:0 0 6px;
overflow-wrap:anywhere}}
h2{{font-size:1.2rem;line-height:1.3;letter-spacing:-.01em;margin:0 0 4px}}
.over{{font-size:.8rem;font-weight:600;letter-spacing:.07em;text-transform:uppercase;
color:var(--soft);margin:0 0 6px}}
.sub,.note{{color:var(--soft);margin:0;overflow-wrap:anywhere}}
.note{{font-size:.9rem;max-width:68ch;margin-bottom:14px}}
section{{background:var(--card);border:1px solid var(--line);border-radius:12px;
padding:22px 24px;margin:18px 0}}
.figures{{display:grid;grid-template-columns:repeat(auto-fit,minmax(190px,1fr));gap:12px;
margin:24px 0 18px;padding:0}}
.figures div{{background:var(--card);border:1px solid var(--line);border-radius:12px;
padding:14px 16px}}
.figures dt{{font-size:.82rem;color:var(--soft)}}
.figures dd{{margin:0;font-size:1.75rem;font-weight:650;line-height:1.25;letter-spacing:-.02em}}
.figures dd small{{display:block;overflow-wrap:anywhere;font-size:.82rem;font-weight:400;
letter-spacing:0;color:var(--soft)}}
.scroll{{overflow-x:auto;margin:0 -24px;padding:2px 24px}}
.scroll:focus-visible{{outline:2px solid var(--c0);outline-offset:-2px}}
svg{{display:block}}
svg.plot{{width:100%;height:auto}}
svg text{{font:12px system-ui,-apple-system,"Segoe UI",Roboto,"Noto Sans",sans-serif;
font-variant-numeric:tabular-nums}}
.ax{{fill:var(--soft)}} .lo{{fill:var(--on-low)}} .hi{{fill:var(--on-high)}}
.track{{fill:var(--track)}} .base{{stroke:var(--line)}}
.bar{{width:100%;height:12px;border-radius:4px}}
.stack{{width:100%;height:26px;border-radius:6px;margin:6px 0 10px}}
.legend{{display:flex;flex-wrap:wrap;gap:8px;align-items:center;font-size:.82rem;
color:var(--soft);margin:12px 0 0}}
.keys{{display:flex;flex-wrap:wrap;gap:4px 20px;list-style:none;margin:0 0 20px;padding:0;
font-size:.9rem}}
.keys i{{display:inline-block;width:.75em;height:.75em;border-radius:3px;margin-right:.5em}}
.bars{{display:grid;grid-template-columns:max-content minmax(60px,1fr) max-content;
gap:7px 14px;align-items:center;margin:0;font-size:.9rem}}
.bars dt,.bars dd{{margin:0}}
.bars dt{{max-width:38vw;overflow-wrap:anywhere}}
.bars .v{{text-align:right;white-space:nowrap}}
.v .soft{{display:inline-block;min-width:4.6em}}
.soft{{color:var(--soft)}}
table{{border-collapse:separate;border-spacing:0;font-size:.86rem;width:100%}}
th,td{{padding:6px 12px;text-align:right;white-space:nowrap;border-bottom:1px solid var(--line)}}
th{{font-weight:600;color:var(--soft);background:var(--card)}}
thead th{{position:sticky;top:0;z-index:1}}
tbody th{{color:var(--ink);font-weight:500}}
tr>:first-child{{text-align:left;position:sticky;left:0;padding-left:24px;background:var(--card)}}
thead tr>:first-child{{z-index:2}}
tr>:last-child{{padding-right:24px}}
.t{{text-align:left}}
.table{{padding:0}}
.tall{{max-height:80vh;overflow:auto}}
tbody tr:hover>*{{background:var(--page)}}
.facts{{display:grid;grid-template-columns:max-content 1fr;gap:4px 18px;margin:0;font-size:.9rem}}
.facts dt{{color:var(--soft)}} .facts dd{{margin:0;overflow-wrap:anywhere}}
footer{{padding-bottom:48px;font-size:.85rem;color:var(--soft)}}
{_SHADES}
h3{{font-size:.95rem;font-weight:600;margin:0 0 8px;overflow-wrap:anywhere}}
h3 span{{font-weight:400;color:var(--soft)}}
.says{{margin:0;padding-left:1.2em;font-size:.95rem}}
.table+.says{{margin-top:16px}}
.says li{{margin:0 0 6px;overflow-wrap:anywhere}}
@media (max-width:560px){{
main,header,footer{{padding-left:14px;padding-right:14px}}
header{{padding-top:24px}}
section{{padding:18px 16px}}
.scroll{{margin:0 -16px;padding:2px 16px}}
.table{{padding:0}}
.tall{{max-height:none}}
.figures{{grid-template-columns:1fr 1fr;gap:10px}}
.figures dd{{font-size:1.45rem}}
th,td{{padding:6px 9px}}
.table:not(.tall) tbody th{{white-space:normal;min-width:8.5em}}
tr>:first-child{{padding-left:16px}}
tr>:last-child{{padding-right:16px}}
}}
@media print{{body{{background:#fff}} section{{break-inside:avoid}}
.tall{{max-height:none;overflow:visible}} section.long{{break-inside:auto}}}}
"""
