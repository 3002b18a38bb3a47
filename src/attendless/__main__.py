from attendless_cli.main import run

run()
