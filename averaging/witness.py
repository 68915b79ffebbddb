"""Whether somebody other than its home vouches for a commit (DESIGN.md rule 6)."""

from __future__ import annotations

from dugnad.averaging.node import Node
from dugnad.averaging.view import View


def witnessed(view: View, node: Node) -> bool:
    """Whether a member other than its home vouches for a commit (rule 6): by an ack, by a commit
    on top, or I myself, holding it. With no other member live there is nobody to ask.
    """
    if node.record is None:
        return True
    home = node.record.header.home
    others = {row.peer for row in node.members if row.peer != home}
    if others & node.witnesses or (view.me in others and node.digest in view.held):
        return True
    for child in view.lineage.nodes.values():
        record = child.record if child.parent == node.digest else None
        if record is not None and record.header.home in others:
            return True
    return not any(peer in others for peer in view.live)


def lone(view: View) -> bool:
    """Whether my head is one that I made alone and that nobody vouches for, now that others are
    back.

    It does not count then (rule 6) and gives way to a lineage with witnesses. Between two such
    heads the heavier wins; its anchors are taken as signed, for the fork's are gone.
    """
    return not witnessed(view, view.head)
