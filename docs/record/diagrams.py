"""Draw the diagrams of docs/architecture.md and docs/parallelism.md.

    python docs/record/diagrams.py docs/images

Boxes and arrows in an SVG each, without fonts or scripts of others, on a background of their own: they read the same
on a light page and on a dark one. A test holds the files equal to what this script draws.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from html import escape
from pathlib import Path

LINE, TITLE = 17, 22
_COLOURS = {"plain": "#eef2f7", "core": "#dbeafe", "work": "#dcfce7", "watch": "#fef3c7", "end": "#fee2e2"}
_STYLE = (
    "text{font:13px system-ui,-apple-system,'Segoe UI','DejaVu Sans',sans-serif;fill:#1f2937}"
    ".title{font-weight:bold;font-size:14px}.label{fill:#475569;font-size:12px}"
    ".box{stroke:#64748b}.arrow{stroke:#475569;stroke-width:1.5;fill:none;marker-end:url(#head)}"
    ".dashed{stroke-dasharray:5 4}"
)


@dataclass(frozen=True)
class Box:
    """A box with a title and lines below it; its measures are pixels."""

    x: int
    y: int
    width: int
    title: str
    lines: tuple[str, ...] = ()
    colour: str = "plain"

    @property
    def height(self) -> int:
        return 16 + TITLE + LINE * len(self.lines)

    def svg(self) -> str:
        rows = [
            f'<rect class="box" x="{self.x}" y="{self.y}" width="{self.width}" height="{self.height}" rx="6"'
            f' fill="{_COLOURS[self.colour]}"/>',
            f'<text class="title" x="{self.x + 12}" y="{self.y + 24}">{escape(self.title)}</text>',
        ]
        for number, line in enumerate(self.lines):
            y = self.y + 24 + TITLE + LINE * number - 3
            rows.append(f'<text x="{self.x + 12}" y="{y}">{escape(line)}</text>')
        return "\n".join(rows)


@dataclass(frozen=True)
class Arrow:
    """A line through `points` that ends in a head; its label begins at `at`, one text line for each part."""

    points: tuple[tuple[int, int], ...]
    label: str = ""
    at: tuple[int, int] = (0, 0)
    is_dashed: bool = False

    def svg(self) -> str:
        path = "M" + " L".join(f"{x} {y}" for x, y in self.points)
        rows = [f'<path class="arrow{" dashed" if self.is_dashed else ""}" d="{path}"/>']
        for number, line in enumerate(self.label.split("\n") if self.label else ()):
            rows.append(f'<text class="label" x="{self.at[0]}" y="{self.at[1] + 15 * number}">{escape(line)}</text>')
        return "\n".join(rows)


def rooms() -> str:
    """The four rooms and the direction of imports."""
    return _picture(
        "The rooms of elaunch, and who imports whom",
        (960, 300),
        Box(20, 30, 210, "launcher/", ("the command line", "options, store, cluster,", "network, submit"), "core"),
        Box(
            310, 30, 250, "agent/", ("one per node: a pure core", "and its hands", "core, session, workers,",
                                    "forkserver, output, guardian"), "core",
        ),
        Box(
            640, 30, 300, "rendezvous/", ("which generation, which ranks:", "pure rules over a store interface",
                                         "rules, engine, etcd, http, server"), "core",
        ),
        Box(
            310, 190, 250, "your program", ("what every worker runs",), "work",
        ),
        Box(
            640, 190, 300, "trainer/", ("keeps the state of a training:", "keeper, memory, checkpoint, data,",
                                       "ledger; and a bundled training loop"), "work",
        ),
        Arrow(((230, 80), (308, 80)), "imports", (246, 72)),
        Arrow(((560, 80), (638, 80)), "imports", (576, 72)),
        Arrow(((435, 136), (435, 188)), "starts; a socket pair is the link", (446, 168), is_dashed=True),
        Arrow(((560, 220), (638, 220)), "may import", (564, 212)),
    )  # fmt: skip


def processes() -> str:
    """The processes of one node."""
    return _picture(
        "The processes of one node",
        (960, 390),
        Box(20, 40, 240, "elaunch (agent)", ("one inbox, one loop", "decides; never imports torch"), "core"),
        Box(20, 270, 240, "guardian", ("own session; ends what is left", "when the agent is gone"), "watch"),
        Box(370, 40, 250, "fork server", ("imports torch once, one thread,", "never starts CUDA"), "plain"),
        Box(700, 20, 240, "worker store", ("torch's TCPStore of", "this generation"), "plain"),
        Box(700, 120, 240, "worker, rank 0", ("your script, forked",), "work"),
        Box(700, 200, 240, "worker, rank 1", ("your script, forked",), "work"),
        Box(370, 270, 250, "the job's store", ("in the agent of one node; else", "served by the head, or an etcd")),
        Arrow(((260, 75), (368, 75)), "starts, orders,\nhears exits", (272, 98)),
        Arrow(((620, 60), (698, 60)), "forks", (640, 52)),
        Arrow(((660, 60), (660, 150), (698, 150))),
        Arrow(((660, 150), (660, 230), (698, 230))),
        Arrow(((100, 112), (100, 268)), "a pipe, whose end\nsays that the agent\nis gone", (110, 190)),
        Arrow(((230, 112), (230, 180), (480, 180), (480, 268)), "lease, watch, transactions", (300, 172)),
        Arrow(
            ((240, 112), (240, 145), (638, 145), (638, 326), (820, 326), (820, 258)),
            "the link of each worker", (646, 344), is_dashed=True,
        ),
    )  # fmt: skip


def generation() -> str:
    """The states of a node's agent through the life of a generation."""
    return _picture(
        "The life of a generation, as one node sees it",
        (960, 330),
        Box(20, 60, 180, "JOINING", ("joined; waits for", "the rank table"), "watch"),
        Box(370, 60, 180, "RUNNING", ("workers run,", "the lease is kept"), "work"),
        Box(740, 60, 200, "STOPPING", ("workers save, stop,", "output is read to its end"), "end"),
        Box(370, 240, 180, "FINISHED", ("all its workers", "ended with 0"), "work"),
        Box(740, 240, 200, "EXITED", ("report and exit code",), "plain"),
        Arrow(((200, 95), (368, 95)), "a table with a seat\nfor this node is sealed", (212, 72)),
        Arrow(((550, 95), (738, 95)), "a worker fails, a signal,\na newer generation", (572, 72)),
        Arrow(((840, 60), (840, 30), (110, 30), (110, 58)), "no worker is left, and the job goes on", (372, 22)),
        Arrow(((460, 132), (460, 238)), "all exit with 0", (470, 190)),
        Arrow(((840, 132), (840, 238)), "the job has ended,\nor this node leaves", (715, 182)),
        Arrow(((550, 275), (738, 275)), "the job has ended", (588, 267)),
        Arrow(((370, 275), (110, 275), (110, 134)), "a newer generation:\nits workers run again", (124, 240)),
    )


def ddp() -> str:
    """A step of DDP: which bucket is exchanged while which gradients are computed."""
    return _picture(
        "A step of DDP: buckets are exchanged while the backward pass goes on",
        (960, 290),
        Box(20, 50, 190, "forward pass", (), "work"),
        Box(212, 50, 118, "backward: d", (), "work"),
        Box(332, 50, 118, "c", (), "work"),
        Box(452, 50, 118, "b", (), "work"),
        Box(572, 50, 118, "a", (), "work"),
        Box(832, 50, 110, "optimizer", (), "work"),
        Box(332, 160, 92, "bucket 0", ("d",), "core"),
        Box(572, 160, 118, "bucket 1", ("c, b",), "core"),
        Box(692, 160, 128, "bucket 2", ("a",), "end"),
        Arrow(((330, 88), (330, 110), (340, 110), (340, 158)), "full: its all-reduce\nbegins", (350, 118)),
        Arrow(((570, 88), (570, 110), (580, 110), (580, 158)), "full", (590, 118)),
        Arrow(((690, 88), (690, 110), (700, 110), (700, 158)), "the last gradient", (710, 118)),
        Arrow(((820, 180), (880, 180), (880, 90)), "all means are there", (826, 204)),
        Arrow(((20, 270), (940, 270)), "time of one rank: computing above, exchanging below. "
              "Red is exposed: nothing is left to compute meanwhile", (20, 258)),
    )  # fmt: skip


def auto() -> str:
    """The steps in which a plan is chosen."""
    return _picture(
        "How --parallel auto chooses a plan, and what a restart does",
        (960, 310),
        Box(20, 40, 200, "1 candidates", ("all plans that the", "workers, the network and", "the batch allow"), "core"),
        Box(270, 40, 200, "2 memory by formulas", ("of each plan, beside", "the memory that there is"), "core"),
        Box(520, 40, 190, "3 try up to eight", ("built in the workers,", "a few steps, and", "discarded"), "work"),
        Box(760, 40, 180, "4 choose one", ("the fastest that fits", "as measured"), "work"),
        Box(270, 215, 200, "left out", ("more memory than", "there is"), "end"),
        Box(520, 215, 190, "a restart", ("goes on with the plan,", "and measures nothing"), "watch"),
        Box(760, 215, 180, "plan.json", ("written before there", "is a state"), "plain"),
        Arrow(((220, 85), (268, 85))),
        Arrow(((470, 85), (518, 85)), "those that fit,\nthe plainest first", (484, 150)),
        Arrow(((710, 85), (758, 85))),
        Arrow(((370, 129), (370, 213)), "too large", (380, 176)),
        Arrow(((850, 112), (850, 213))),
        Arrow(((760, 250), (712, 250))),
    )  # fmt: skip


def _picture(title: str, size: tuple[int, int], *parts: Box | Arrow) -> str:
    width, height = size
    space = f'viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" {space}>',
            f"<title>{escape(title)}</title>",
            f"<style>{_STYLE}</style>",
            '<defs><marker id="head" markerWidth="9" markerHeight="8" refX="8" refY="4" orient="auto">'
            '<path d="M0 0 L9 4 L0 8 z" fill="#475569"/></marker></defs>',
            f'<rect width="{width}" height="{height}" rx="8" fill="#ffffff"/>',
            *(part.svg() for part in parts),
            "</svg>",
            "",
        ]
    )


PICTURES = {
    "rooms.svg": rooms,
    "processes.svg": processes,
    "generation.svg": generation,
    "ddp.svg": ddp,
    "auto.svg": auto,
}

if __name__ == "__main__":
    for name, draw in PICTURES.items():
        (Path(sys.argv[1]) / name).write_text(draw())
