"""`python -m benchmarks.readers`: a folder of vectors in shards is one data set for pyarrow, DuckDB and Spark.

Spark needs Java (Debian's openjdk-17-jre-headless), and lives in an environment of its own, which is made and removed
here. Ends with an error if a reader finds other names or vectors than those that one process writes into one file.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import venv
from collections.abc import Callable
from pathlib import Path

import duckdb
import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq

from .streams import show, write_tiny

IMAGES, SHARDS = 4_000, 4
SPARK = "pyspark>=4"
READ = """
import sys
from pyspark.sql import SparkSession
spark = SparkSession.builder.master("local[1]").config("spark.ui.enabled", "false").getOrCreate()
spark.sparkContext.setLogLevel("ERROR")
spark.read.parquet(sys.argv[1]).coalesce(1).write.parquet(sys.argv[2])
"""


def main() -> int:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_tiny(folder / "tiny", IMAGES)
        embed(folder, "one.parquet")
        embed(folder, "vectors", "--shard", f"all/{SHARDS}")
        right = in_order(pq.read_table(folder / "one.parquet"))
        rows = [found(reader, folder, right) for reader in (by_pyarrow, by_duckdb, by_spark)]
    show(f"{IMAGES:,} vectors in {SHARDS} shards", rows)
    return 0 if all(row["equal"] == IMAGES for row in rows) else 1


def embed(folder: Path, out: str, *more: str) -> None:
    words = ["embed", "selfmask/tiny", str(folder / "tiny/tars"), "--out", str(folder / out), *more]
    environment = os.environ | {"SELFMASK_CACHE": str(folder / "cache")}
    subprocess.run([sys.executable, "-m", "selfmask", *words], check=True, env=environment, stdout=subprocess.DEVNULL)


def in_order(table: pa.Table) -> dict[str, list[float]]:
    return dict(sorted(zip(table["name"].to_pylist(), table["vector"].to_pylist(), strict=True)))


def found(
    reader: Callable[[Path], tuple[str, pa.Table]], folder: Path, right: dict[str, list[float]]
) -> dict[str, object]:
    name, table = reader(folder)
    own = in_order(table)
    equal = sum(own.get(each) == vector for each, vector in right.items())
    return {"reader": name, "rows": table.num_rows, "equal": equal}


def by_pyarrow(folder: Path) -> tuple[str, pa.Table]:
    return f"pyarrow {pa.__version__}", ds.dataset(folder / "vectors", format="parquet").to_table()


def by_duckdb(folder: Path) -> tuple[str, pa.Table]:
    return f"DuckDB {duckdb.__version__}", duckdb.sql(f"from '{folder}/vectors/*.parquet'").to_arrow_table()


def by_spark(folder: Path) -> tuple[str, pa.Table]:
    """What it reads it writes again, as one file, which is read here."""
    own = folder / "spark"
    venv.create(own, with_pip=True)
    subprocess.run([own / "bin/pip", "install", "-q", "--disable-pip-version-check", SPARK], check=True)
    python = own / "bin/python"
    asked = [python, "-c", "import pyspark; print(pyspark.__version__)"]
    version = subprocess.run(asked, check=True, capture_output=True, text=True).stdout.strip()
    environment = os.environ | {"PYSPARK_PYTHON": str(python), "SPARK_LOCAL_IP": "127.0.0.1"}
    words = [python, "-c", READ, folder / "vectors", folder / "again"]
    subprocess.run(words, check=True, env=environment, stderr=subprocess.DEVNULL)
    return f"Spark {version}", ds.dataset(folder / "again", format="parquet").to_table()


if __name__ == "__main__":
    sys.exit(main())
