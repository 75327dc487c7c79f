"""The noise of sketches and packed operations, and what blocks save."""
