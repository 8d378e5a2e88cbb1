"""Shared by passes: the interface of a pass, notes for the report, reading and building nodes. No pass is here."""
