"""The playground of bank conflicts counts as simt/banks.cpp does, and lays out as the steps do."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Sequence
from itertools import product
from pathlib import Path

import pytest

from common.paths import ROOT
from common.records import PROFILES_DIR, STATIC
from common.report.diagrams.fragments import in_tile, swizzled
from common.report.page.banks import LANES, TILES
from common.runtime.build import host_compiler
from verify.tests.cpp_constants import constants

SIMT = ROOT / "common" / "runtime" / "simt"

# Each line of input is the bytes per lane and the 32 lanes' offsets, -1 of lanes that stay away.
COUNTER = """
#include "banks.h"
#include <cstdio>

int main() {
    int bytes;
    while (scanf("%d", &bytes) == 1) {
        simt::BankCounter counter;
        for (int lane = 0; lane < simt::WARP_SIZE; ++lane) {
            int offset;
            if (scanf("%d", &offset) != 1 || offset < 0) continue;
            counter.count("", {}, lane, offset, bytes);
        }
        counter.end_block();
        const auto& places = counter.places();
        if (places.empty()) puts("0 0");
        else printf("%lld %lld\\n", places[0].ideal, places[0].wavefronts);
    }
}
"""

Warp = tuple[int, Sequence[int | None]]  # bytes per lane, each lane's address


@pytest.fixture(scope="module")
def counter(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("counter")
    source, program = folder / "counter.cpp", folder / "counter"
    source.write_text(COUNTER)
    files = [source, SIMT / "banks.cpp"]
    command = [*host_compiler(), "-std=c++20", f"-I{SIMT}", *files, "-o", program]
    subprocess.run(command, check=True)
    return program


def counted(counter: Path, warps: Sequence[Warp]) -> list[list[int]]:
    """The ideal and the wavefronts of each, by simt/banks.cpp."""
    lines = [[size, *(-1 if at is None else at for at in lanes)] for size, lanes in warps]
    text = "\n".join(" ".join(map(str, line)) for line in lines)
    output = subprocess.run([counter], input=text, capture_output=True, text=True, check=True)
    return [[int(number) for number in line.split()] for line in output.stdout.splitlines()]


def on_page(page, warps: Sequence[Warp]) -> list[list[int]]:
    return page.evaluate(
        """(warps) => warps.map(([bytes, lanes]) => {
            const { ideal, wavefronts } = worklog.models.banks.access(lanes, bytes);
            return [ideal, wavefronts];
        })""",
        warps,
    )


def data(page) -> dict:
    return json.loads(page.locator("#data").text_content())["banks"]


def page_addresses(page, places: Sequence, pitch: int, swizzle: dict) -> list[int | None]:
    return all_addresses(page, [(places, pitch, swizzle)])[0]


def all_addresses(page, rows: Sequence) -> list[list[int | None]]:
    return page.evaluate(
        """(all) => all.map(([places, pitch, swizzle]) => places.map((place) =>
            place && worklog.models.banks.address(place[0], place[1], pitch, swizzle)))""",
        rows,
    )


def warps(page) -> list[Warp]:
    """Every access over many pitches and swizzles, with some from a byte further on."""
    found = data(page)
    sizes, rows = [], []
    for access, swizzle in product(found["accesses"], found["swizzles"]):
        size = access["laneBytes"]
        pitches = {size, 16, 32, 64, 120, 128, 132, 136, 144, 256, 272, 288, 512}
        for pitch, first in product(pitches, (0, size)):
            places = [place and [place[0], place[1] + first] for place in access["places"]]
            sizes.append(size)
            rows.append((places, pitch, swizzle))
    return [
        (size, lanes)
        for size, lanes in zip(sizes, all_addresses(page, rows), strict=True)
        if all(at is None or at % size == 0 for at in lanes)
    ]


def test_wavefronts_are_the_runtimes(open_page, counter):
    page = open_page()
    every = warps(page)
    # Lanes that stay away, and none at all.
    every += [(size, [at if t % 3 else None for t, at in enumerate(x)]) for size, x in every[::7]]
    every += [(size, [None] * 32) for size in (4, 8, 16)]
    shown = on_page(page, every)
    assert shown == counted(counter, every)
    assert len(every) > 1000
    assert {wavefronts for _, wavefronts in shown} >= {0, 1, 2, 4, 8, 16, 32}

    # The comparison notices banks of another width.
    page.evaluate("worklog.models.banks.WORD = 8")
    assert on_page(page, every) != shown


def test_each_word_is_delivered_once_to_the_lanes_that_want_it(open_page):
    page = open_page()
    some = warps(page)[::29]
    results = page.evaluate(
        "(all) => all.map(([size, lanes]) => worklog.models.banks.access(lanes, size))", some
    )
    for (size, lanes), result in zip(some, results, strict=True):
        for phase in result["phases"]:
            expected = {}
            for lane in range(phase["first"], phase["last"] + 1):
                for i in range(size // 4 if lanes[lane] is not None else 0):
                    expected.setdefault(lanes[lane] // 4 + i, []).append(lane)
            assert {each["word"]: each["lanes"] for each in phase["words"]} == expected
            assert all(each["bank"] == each["word"] % 32 for each in phase["words"])
            at_once = {(each["bank"], each["wavefront"]) for each in phase["words"]}
            assert len(at_once) == len(phase["words"])
            passes = {each["wavefront"] for each in phase["words"]}
            assert passes == set(range(phase["wavefronts"]))


def test_swizzles_are_those_of_tma_and_of_the_steps(open_page):
    page = open_page()
    of = {each["name"]: each for each in data(page)["swizzles"]}
    places = list(product(range(24), range(0, 128, 2)))
    in_panel = [in_tile(24, row, byte // 2) for row, byte in places]
    assert page_addresses(page, places, 128, of["128B"]) == in_panel
    assert page_addresses(page, places, 128, of["row"]) == in_panel
    chunks = list(product(range(24), range(8)))
    assert page_addresses(page, [(row, 16 * chunk) for row, chunk in chunks], 128, of["row"]) == [
        swizzled(row, chunk) for row, chunk in chunks
    ]
    # The PTX ISA's patterns repeat after 256 and 512 bytes: 8 rows.
    for name, width, rows_alike in (("32B", 32, 4), ("64B", 64, 2)):
        places = list(product(range(24), range(0, width, 16)))
        assert page_addresses(page, places, width, of[name]) == [
            row * width + (byte // 16 ^ row // rows_alike % (width // 16)) * 16
            for row, byte in places
        ]
    # v07's swizzle(row, col), in 16-bit elements, in rows of 256 bytes.
    places = list(product(range(24), range(128)))
    in_bytes = [(row, 2 * col) for row, col in places]
    assert page_addresses(page, in_bytes, 256, of["row"]) == [
        2 * (128 * row + (col ^ row % 8 * 8)) for row, col in places
    ]


def test_tiles_are_the_steps():
    pitches = {
        ("v02", "load_float4(&tile.k"): 4 * (constants("v02")["TILE_D"] + 4),
        ("v03", "store_float4(&tile[r][d + i]"): 4 * constants("v03")["HEAD_DIM"],
        ("v05", "store_float4(&warp.s"): 4 * constants("v05")["S_PITCH"],
        ("v05", "store_float4(&warp.p"): 2 * constants("v05")["S_PITCH"],
        ("v06_no_padding", "ldmatrix_x4(k_frag"): 2 * constants("v06")["DIM"],
        ("v06", "ldmatrix_x4(k_frag"): 2 * constants("v06")["PITCH"],
        ("v07", "ldmatrix_x4(k_frag"): 2 * constants("v07")["PITCH"],
        ("v07", "ldmatrix_x4_trans(v_frag"): 2 * constants("v07")["PITCH"],
        ("v08", "stmatrix_x4("): 2 * constants("v08")["PANEL"],
    }
    assert {(tile.name, tile.code): tile.pitch for tile in TILES} == pitches


def test_a_tile_takes_the_wavefronts_that_its_static_record_counts(open_page):
    page = open_page()
    for n, tile in enumerate(TILES):
        record = json.loads((PROFILES_DIR / STATIC / f"{tile.name}.json").read_text("utf-8"))
        (place,) = [each for each in record["banks"] if each["code"].startswith(tile.code)]
        ideal, wavefronts = (place[key] / place["accesses"] for key in ("ideal", "wavefronts"))
        control(page, "Start from").select_option(str(n))
        told = f"Wavefronts: {wavefronts:g}, ideal {ideal:g}."
        assert page.locator("#banks .told b").text_content() == told


def control(page, label: str):
    return page.locator("#banks label", has_text=re.compile(f"^{label}")).locator("select, input")


def test_the_board_shows_the_lanes_where_they_meet_banks(open_page):
    page = open_page()
    control(page, "Swizzle").select_option("none")
    control(page, "A warp accesses").select_option("word_column")
    control(page, "Row pitch").fill("256")
    assert "Wavefronts: 32, ideal 1." in page.locator("#banks .told").text_content()
    assert page.locator("#banks .hit text").all_text_contents() == [str(lane) for lane in LANES]
    assert page.locator("#banks .most text").all_text_contents() == ["32"]
    control(page, "Row pitch").fill("132")
    assert "Wavefronts: 1, ideal 1." in page.locator("#banks .told").text_content()
    control(page, "A warp accesses").select_option("word_same")
    assert page.locator("#banks .hit text").all_text_contents() == ["0–31"]


def test_what_is_not_allowed_is_said(open_page):
    page = open_page()
    told, note = page.locator("#banks .told"), page.locator("#banks .note")
    control(page, "A warp accesses").select_option("quad_column")
    for pitch, said in (
        ("132", "lane 1 would access 16 bytes at byte 132, which is no multiple of 16"),
        ("6", "A row pitch is a multiple of 4 bytes from 4 to 4096."),
        ("", "A row pitch is a multiple of 4 bytes from 4 to 4096."),
    ):
        control(page, "Row pitch").fill(pitch)
        assert said in told.text_content()
        assert not page.locator("#banks .hit").count()
    control(page, "Row pitch").fill("144")
    control(page, "Swizzle").select_option("row")
    assert "here a chunk can leave its row" in note.text_content()
    control(page, "Swizzle").select_option("64B")
    assert "TMA writes rows of 64 bytes" in note.text_content()
    control(page, "from byte").fill("132")
    assert "Not allowed: lane 0" in told.text_content()
    control(page, "from byte").fill("144")
    assert "past its end" in note.text_content()
