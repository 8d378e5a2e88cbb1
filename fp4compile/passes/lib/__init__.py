"""What passes share: what a pass is, notes for the report, and how they read and make nodes. No pass is here."""
