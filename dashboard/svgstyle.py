"""Colours of charts that stand alone, as in a README; pages use the style sheet."""

from typing import Final

SVG_STYLE: Final = (
    ":root{--ink:#1d2327;--dim:#56606a;--rule:#d5dade;--paper:#fff;"
    "--s1:#1f5fa8;--s2:#b3470b;--s3:#1d7045;--s4:#7a3d9c;--s5:#8a6100;--s6:#a61b56;--s7:#5b6570}"
    "@media(prefers-color-scheme:dark){:root{--ink:#e7eaec;--dim:#a6b0b8;--rule:#3a434a;"
    "--paper:#14191d;--s1:#7db6f2;--s2:#f0a26b;--s3:#6cc793;--s4:#cba3e4;--s5:#dcb75c;"
    "--s6:#f291b8;--s7:#a6b0b8}}"
    "svg{background:var(--paper);font:12px system-ui,sans-serif}"
    "text{fill:var(--ink)}.tick,.unit,.none{fill:var(--dim)}"
    ".grid{stroke:var(--rule);fill:none}.axis{stroke:var(--dim);fill:none}"
    ".curve{fill:none;stroke-width:1.8}.fill{opacity:.16}.band,.track{fill:var(--rule);opacity:.6}"
    ".hatch{stroke:var(--paper);stroke-width:1.3;fill:none}"
    ".mark{fill:var(--dim)}.curve.s2{stroke-dasharray:6 3}"
    + "".join(
        f".curve.s{n}{{stroke:var(--s{n})}}.fill.s{n},.bar.s{n},.dot.s{n}{{fill:var(--s{n})}}"
        for n in range(1, 8)
    )
)
