"""The style sheet of a report's page."""

from __future__ import annotations

_LIGHT = """
--page:#fbfbfa;--card:#ffffff;--ink:#1d2126;--soft:#626b75;--line:#e3e5e8;--grid:#eceef0;
--c1:#2f6fd0;--c2:#d9752b;--c3:#2d9a6c;--c4:#b8466b;--c5:#7d5bc4;--c6:#8a949e;--good:#1f7a4d;--bad:#b3262f;--open:#8a5a00;
"""
_DARK = """
--page:#14171a;--card:#1c2024;--ink:#e6e9ec;--soft:#98a2ad;--line:#31373d;--grid:#272c31;
--c1:#6ba3f5;--c2:#f0a060;--c3:#5fc79a;--c4:#ea8aa8;--c5:#b39af0;--c6:#8b95a0;--good:#5fc79a;--bad:#f28b8b;--open:#e0b050;
"""
_COLORS = "".join(
    f".s{number}{{stroke:var(--c{number})}}.f{number}{{fill:var(--c{number})}}.k{number}{{background:var(--c{number})}}"
    for number in range(1, 7)
)

#: Colours follow the reader's setting; ``print-color-adjust`` keeps them on paper.
STYLE = (
    f":root{{color-scheme:light dark;{_LIGHT}}}"
    f"@media(prefers-color-scheme:dark){{:root{{{_DARK}}}}}"
    """
*{box-sizing:border-box}
body{margin:0;background:var(--page);color:var(--ink);
 font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,sans-serif;
 print-color-adjust:exact}
main{max-width:1180px;margin:0 auto;padding:28px 20px 40px}
h1{font-size:26px;margin:0 0 4px;letter-spacing:-.01em}h2{font-size:16px;margin:34px 0 10px}
.sub{margin:0;color:var(--soft)}
.path,.code td,.code th{font-family:ui-monospace,Menlo,Consolas,monospace;font-size:13px}
.state{font-size:14px;font-weight:600;vertical-align:middle;border:1px solid;border-radius:99px;padding:2px 10px}
.good{color:var(--good)}.bad{color:var(--bad)}.open{color:var(--open)}
.message{border-left:3px solid var(--bad);padding:6px 12px;background:var(--card);
 white-space:pre-wrap;overflow-wrap:anywhere}
.tiles{display:grid;grid-template-columns:repeat(auto-fit,minmax(128px,1fr));gap:10px;margin-top:22px}
.tiles div{background:var(--card);border:1px solid var(--line);border-radius:8px;padding:10px 12px}
.tiles span,.tiles small{display:block;color:var(--soft);font-size:12.5px}
.tiles b{font-size:16px;white-space:nowrap;font-variant-numeric:tabular-nums;letter-spacing:-.01em}
.charts{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(420px,100%),1fr));gap:14px}
figure{margin:0;background:var(--card);border:1px solid var(--line);border-radius:8px;padding:12px 12px 4px}
figcaption{display:flex;flex-wrap:wrap;gap:2px 8px;align-items:baseline;font-size:14px;min-height:24px}
.unit{color:var(--soft);font-size:12.5px}.legend{color:var(--soft);font-size:12.5px;margin-left:auto}
p.legend{margin:8px 0 0;font-size:13.5px}.key{display:inline-block;margin:0 14px 0 0;white-space:nowrap}
.key b{color:var(--ink);font-weight:600}
.key i{display:inline-block;width:12px;height:10px;border-radius:2px;margin-right:6px}
figure .key{margin:0 0 0 12px}.key i.faint{opacity:.35}.key i.dashed{height:3px;vertical-align:middle}
svg{display:block;width:100%;height:auto}svg.bar{height:26px;border-radius:5px;overflow:hidden}
polyline{fill:none;stroke-width:1.8;stroke-linejoin:round}
.faint{opacity:.35;stroke-width:1}.dashed{stroke-dasharray:5 4}
.grid{stroke:var(--grid)}.axis{stroke:var(--line)}
.tick{fill:var(--soft);font-size:11px;font-variant-numeric:tabular-nums}
.mark line{stroke:var(--soft);stroke-dasharray:2 3}.tip{fill:transparent}.tip:hover{fill:var(--soft);fill-opacity:.18}
.wide{overflow-x:auto;background:var(--card);border:1px solid var(--line);border-radius:8px}
table{border-collapse:collapse;width:100%}td,th{padding:6px 14px;text-align:left;border-top:1px solid var(--grid)}
thead th{border-top:0;color:var(--soft);font-weight:500;font-size:13px}tbody tr:first-child td{border-top:0}
thead+tbody tr:first-child td{border-top:1px solid var(--line)}
.number{text-align:right;font-variant-numeric:tabular-nums;white-space:nowrap}
td:first-child{white-space:nowrap}@media(max-width:760px){td:first-child{white-space:normal;min-width:130px;
 overflow-wrap:break-word}td:last-child{min-width:200px}td.number{min-width:0}}footer{margin-top:34px;color:var(--soft);font-size:12.5px}
""" + _COLORS
)
