"""Layer 2: manifests, metrics sinks, progress and provenance."""
