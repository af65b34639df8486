"""What Slipstream costs, as ratios of a contender to a floor, side by side in one run: `slipstream bench NAME [--json]`."""
