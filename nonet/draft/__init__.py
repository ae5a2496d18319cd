"""Drafts: from a target model's own answers to a speculator that proposes its next tokens."""
