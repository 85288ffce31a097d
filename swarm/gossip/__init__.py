"""NoLoCo: peers merge their weights in random pairs, without common rounds."""
