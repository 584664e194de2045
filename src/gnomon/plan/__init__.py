"""The planner: what fits, which wall binds, which knob is cheapest to turn. Free of torch."""
