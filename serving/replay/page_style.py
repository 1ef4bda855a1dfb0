"""How a page looks: on a laptop, in light and dark, and on paper."""

from __future__ import annotations

_LIGHT = ("#0b62a8", "#c2410c", "#15803d", "#8b2fb3", "#92640a", "#0e7490", "#be185d", "#475569")
_DARK = ("#6cb6ff", "#ff9d5c", "#5fd38d", "#d29bf5", "#e3b341", "#56d4dd", "#ff8ac0", "#a3b3c6")
_DASHES = ("none", "7 3", "2 3", "10 3 2 3")
"""Lines differ without colours too."""


def _colours(colours: tuple[str, ...]) -> str:
    return "".join(f"--s{at}:{colour};" for at, colour in enumerate(colours))


def _lines() -> str:
    return "\n".join(
        f".s{at}{{--c:var(--s{at})}} .line.s{at}{{stroke-dasharray:{_DASHES[at % len(_DASHES)]}}}"
        for at in range(len(_LIGHT))
    )


STYLE = f"""
:root{{color-scheme:light dark;--paper:#fff;--card:#f6f7f9;--ink:#1b1f24;--soft:#57606a;--edge:#d5dae0;
--load:#0b62a8;--rate:#15803d;--prefill:#92640a;--good:#116329;--bad:#a40e26;--mark:#fff3bf;{_colours(_LIGHT)}}}
@media screen and (prefers-color-scheme:dark){{:root{{--paper:#0f1317;--card:#181e24;--ink:#e8ecf0;--soft:#a2adb8;
--edge:#333c45;--load:#6cb6ff;--rate:#5fd38d;--prefill:#e3b341;--good:#5fd38d;--bad:#ff8f87;--mark:#4d4312;
{_colours(_DARK)}}}}}
*{{box-sizing:border-box}}
body{{margin:0 auto;max-width:1400px;padding:20px 24px 48px;background:var(--paper);color:var(--ink);
font:15px/1.45 system-ui,-apple-system,"Segoe UI",Roboto,"DejaVu Sans",sans-serif}}
h1{{font-size:1.6rem;margin:0 0 4px}} h2{{font-size:1.2rem;margin:32px 0 10px}} h3{{font-size:1rem;margin:14px 0 6px}}
.lead,.note{{color:var(--soft)}} .note{{display:block;font-size:.82rem}} p{{margin:0 0 10px}}
.cards{{display:grid;grid-template-columns:repeat(auto-fill,minmax(220px,1fr));gap:10px;margin:0}}
.cards div{{background:var(--card);border:1px solid var(--edge);border-radius:8px;padding:8px 12px;display:flex;
flex-direction:column;justify-content:space-between}}
.cards dt{{font-size:.8rem;color:var(--soft)}} .cards dd{{margin:0;font-size:1.45rem;font-variant-numeric:tabular-nums}}
.two,.four{{display:grid;gap:12px;grid-template-columns:repeat(auto-fit,minmax(min(100%,500px),1fr))}}
.four{{grid-template-columns:repeat(auto-fit,minmax(min(100%,270px),1fr))}}
figure{{margin:0;background:var(--card);border:1px solid var(--edge);border-radius:8px;padding:10px 12px;min-width:0}}
figcaption{{display:flow-root;margin-bottom:4px}} figure>svg{{width:100%;height:auto;display:block}}
.legend{{display:flex;flex-wrap:wrap;gap:2px 14px;list-style:none;margin:0;padding:0;font-size:.85rem}}
.legend li{{overflow-wrap:anywhere}} .key{{width:26px;height:8px;margin-right:5px;vertical-align:middle}}
.shades{{float:right;font-size:.8rem;color:var(--soft);white-space:nowrap}} .shades svg{{vertical-align:-1px}}
svg text{{font-size:12px;fill:var(--soft);font-variant-numeric:tabular-nums}} svg text.name{{fill:var(--ink)}}
svg text.pin{{fill:var(--ink);font-weight:600}}
.grid{{stroke:var(--edge);fill:none}} .axis{{stroke:var(--soft);fill:none}}
.line{{stroke:var(--c);fill:none;stroke-width:1.5;stroke-linejoin:round;stroke-linecap:round}}
{_lines()}
.dot{{fill:var(--c);fill-opacity:.35;stroke:var(--c);stroke-width:1.5}} .dot.front{{fill-opacity:1;stroke:var(--ink)}}
.front-line{{stroke:var(--soft);fill:none;stroke-dasharray:4 4}}
.bar{{fill:var(--load)}} .bar.prefill{{fill:var(--prefill)}} .load{{fill:var(--load)}} .rate{{fill:var(--rate)}}
.band{{fill:var(--ink);fill-opacity:0}} .band:hover{{fill-opacity:.1}} .bar:hover,.dot:hover{{stroke:var(--ink)}}
.wide{{overflow-x:auto;margin:8px 0 16px}}
table{{border-collapse:collapse;font-variant-numeric:tabular-nums;font-size:.9rem}}
caption{{text-align:left;color:var(--soft);font-size:.85rem;padding-bottom:6px}}
th,td{{padding:4px 12px;border-bottom:1px solid var(--edge);text-align:right;white-space:nowrap}}
th:first-child{{text-align:left}} thead th{{border-bottom:2px solid var(--edge)}} tbody th{{font-weight:500}}
tbody tr:hover{{background:var(--card)}} thead th{{white-space:normal;overflow-wrap:anywhere;
min-width:7em}} .value{{display:inline-block;max-width:48ch;white-space:normal;overflow-wrap:anywhere}}
.change{{display:inline-block;min-width:5.8em;font-size:.85em}} .good{{color:var(--good)}} .bad{{color:var(--bad)}}
.same{{color:var(--soft)}} .best{{color:var(--good)}} mark{{background:var(--mark);color:inherit;padding:0 3px}}
details{{margin:8px 0}} summary{{cursor:pointer;color:var(--soft)}}
@media print{{@page{{size:A4 landscape;margin:12mm}}
:root{{font-size:11px}} body{{max-width:none;padding:0;font-size:11px}}
*{{print-color-adjust:exact;-webkit-print-color-adjust:exact}} h2,h3{{break-after:avoid}}
figure,tr{{break-inside:avoid}}
.two{{grid-template-columns:1fr 1fr}} .four{{grid-template-columns:repeat(4,1fr)}} .wide{{overflow:visible}}
details::details-content{{content-visibility:visible;display:block}}}}
"""
