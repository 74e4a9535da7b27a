"""Decisions without side effects: model, quorum, plan, vote, and the member's state machine."""
