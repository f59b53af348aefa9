"""Tables of moves between placements: what a reduction takes, in place and of a tensor that another layer holds."""

from __future__ import annotations

from scrimp.cluster import Cluster
from scrimp.layout import Mesh
from scrimp.planner import placed, unsplit
from scrimp.planner.cost.greedy_move import AxisWise
from scrimp.planner.cost.move_tables import Moves


def test_a_partial_sum_of_another_layer_is_not_reduced_in_place() -> None:
    """Besides the source there are the summands and, if the source stays, the sum: each as large as the tensor."""
    moves = Moves(AxisWise(Mesh.parse("x=2"), Cluster()))
    whole, split = unsplit((8, 16)), placed([[(8, ("x",))], [(16, ())]])
    partial, nbytes = placed([[(8, ())], [(16, ())]], ("x",)), 4 * 8 * 16
    _, copies, own = moves.tables([partial, whole], [whole, split], 4)
    _, _, others = moves.tables([partial, whole], [whole, split], 4, given=True)
    assert copies[0, 0] == 0
    assert own[0, 0] == nbytes
    assert others[0, 0] == 2 * nbytes
    assert (others[1] == own[1]).all()  # nothing is summed
    assert others[0, 1] == own[0, 1]  # a copy, which is counted as one
