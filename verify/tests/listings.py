"""Listings of machine code as `nvdisasm -c -plr -lrm narrow` writes them, made up."""

from __future__ import annotations


def listing(*code: str | tuple[str, str]) -> str:
    """Of a kernel of these labels, as .L_x_1, and instructions.

    With an instruction may come marks of R0, R1, ...: ^ is written, x read and written.
    """
    lines = [".section .text.kernel", f"{'':80}// |   # 0123456789012345  |"]
    for item in code:
        text, marks = (item, "") if isinstance(item, str) else item
        instruction = f"/*{16 * len(lines):04x}*/ {text} ;"
        is_label = text.startswith(".L")
        lines.append(f"{text}:" if is_label else f"{instruction:80}// |   9 {marks:16}  |")
    return "\n".join(lines)
