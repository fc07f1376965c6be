"""How the models in demo_models/ were trained; each file opens with its command."""
