"""Placement of peers on stages: cuts of the model, load, choices and moves."""
