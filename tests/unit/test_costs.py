"""Memory and traffic of strategies, worked out by hand."""

from __future__ import annotations

from allhands.parallel.costs import ExpertCosts, Memory, Traffic


def test_divided_experts_are_a_part_of_everything_but_activations() -> None:
    """Of 100 bytes of weights 80 are experts: of four ranks each has 20 of these, and the 20 that
    are none.
    """
    whole = Memory(
        weights=100,
        optimizer=200,
        backward=150,
        loss=70,
        update=50,
        activations=50,
        renewed=50,
        trained=100,
    )
    costs = ExpertCosts(expert_share=0.8, hidden_bytes=10, mixtures=3)
    part = costs.memory(whole, 4)
    assert (part.weights, part.trained, part.optimizer, part.update, part.renewed) == (
        40,
        40,
        80,
        20,
        20,
    )
    assert (part.activations, part.backward, part.loss) == (50, 50 + 40, 70)
    assert costs.memory(whole, 1) == whole
    # Gradients of what is whole, and hidden states twice a block in each direction.
    assert costs.traffic(100, 100, scatters=True) == Traffic(
        all_reduced=20, gathered=60, scattered=60
    )
    assert costs.traffic(100, 100, scatters=False) == Traffic(all_reduced=20 + 60, gathered=60)
