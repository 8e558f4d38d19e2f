//! Programs of `docs/recipes.md` by what they ask of CUDA, in the shares of its table.

use drava_vgpu_abi::Limits;

use crate::test_process::{Container, GPUS, MIB, TestProcess};

/// Charge of a context on an H100, as the node driver estimates it.
const CONTEXT_MIB: u64 = 528;

/// A row of the table for an H100.
struct Row {
    share_mib: u64,
    free_mib: u64,
    free_of_two_mib: u64,
    /// Hundredths.
    utilization: u64,
    left_by_jax_mib: u64,
}

fn rows() -> Vec<Row> {
    let number = |text: &str| {
        let digits: String = text.chars().filter(char::is_ascii_digit).collect();
        digits.parse::<u64>().unwrap()
    };
    let rows: Vec<Row> = include_str!("../../../docs/recipes.md")
        .lines()
        .filter(|line| line.starts_with("| `"))
        .map(|line| {
            let cells: Vec<u64> = line.trim_matches('|').split('|').map(number).collect();
            let [gib, free_mib, free_of_two_mib, utilization, left_by_jax_mib] = cells[..] else {
                panic!("{line}");
            };
            let share_mib = gib * 1024;
            Row {
                share_mib,
                free_mib,
                free_of_two_mib,
                utilization,
                left_by_jax_mib,
            }
        })
        .collect();
    let shares: Vec<u64> = rows.iter().map(|row| row.share_mib / 1024).collect();
    assert_eq!(shares, [4, 8, 20]);
    rows
}

fn container(row: &Row) -> Container {
    let container = Container::new();
    let limits = Limits {
        driver_reserve_bytes: CONTEXT_MIB * MIB,
        ..Limits::memory(row.share_mib * MIB)
    };
    container.add_share("share", GPUS[0], &limits);
    container
}

/// Free and total memory, MiB.
fn memory_mib(process: &mut TestProcess) -> (u64, u64) {
    let (free, total) = process.memory_info();
    (free / MIB, total / MIB)
}

/// vLLM, SGLang and TGI demand a part of the total to be free, and take it: weights in pieces, then the cache.
#[test]
fn vllm_starts_with_utilization_of_table() {
    for row in rows() {
        let container = container(&row);
        let mut engine = container.process();
        let (free, total) = memory_mib(&mut engine);
        assert_eq!((free, total), (row.free_mib, row.share_mib));
        let demand = |hundredths: u64| total * hundredths / 100;
        assert!(demand(row.utilization) <= free && demand(row.utilization + 1) > free);
        let weights = demand(row.utilization) / 3;
        for _ in 0..weights / 64 {
            engine.alloc(64 * MIB);
        }
        engine.alloc((demand(row.utilization) - weights / 64 * 64) * MIB);
    }
}

/// JAX takes 75% of the total at once.
#[test]
fn jax_reserves_three_quarters_of_share() {
    for row in rows() {
        let container = container(&row);
        let mut program = container.process();
        let (_, total) = memory_mib(&mut program);
        program.alloc(total * 3 / 4 * MIB);
        assert_eq!(memory_mib(&mut program).0, row.left_by_jax_mib);
    }
}

/// Two ranks of PyTorch in one share: each has a context.
#[test]
fn two_ranks_have_half_of_the_rest_each() {
    for row in rows() {
        let container = container(&row);
        let mut ranks = [container.process(), container.process()];
        for rank in &mut ranks {
            // Blocks of the caching allocator.
            let blocks = row.free_of_two_mib / 20;
            for _ in 0..blocks {
                rank.alloc(20 * MIB);
            }
        }
        for rank in &mut ranks {
            let rest = 2 * (row.free_of_two_mib % 20);
            assert_eq!(memory_mib(rank), (rest, row.share_mib));
        }
        ranks[0].denied(&format!("alloc {}", 42 * MIB));
    }
}

/// Triton with a pool and two instances of a Python model: the server and each instance have a context.
#[test]
fn triton_with_two_python_models_has_three_contexts() {
    for row in rows() {
        let container = container(&row);
        let mut server = container.process();
        server.alloc(64 * MIB);
        let mut models = [container.process(), container.process()];
        let free = row.share_mib - 3 * CONTEXT_MIB - 64;
        for model in &mut models {
            model.alloc(free / 2 * MIB);
        }
        assert_eq!(memory_mib(&mut server), (0, row.share_mib));
    }
}

/// Ollama places as many layers as fit into the free memory, and has a process for each model: three contexts leave little of a
/// small share.
#[test]
fn ollama_fills_free_memory_with_layers() {
    const LAYER_MIB: u64 = 150;
    for row in rows() {
        let container = container(&row);
        let mut model = container.process();
        let (free, _) = memory_mib(&mut model);
        for _ in 0..free / LAYER_MIB {
            model.alloc(LAYER_MIB * MIB);
        }
        model.denied(&format!("alloc {}", LAYER_MIB * MIB));
        let (left, _) = memory_mib(&mut model);
        let mut second = container.start("dlsym");
        let has_context = second.query("init 0")[0] == 0;
        assert_eq!(has_context, left >= CONTEXT_MIB, "{left} MiB left");
    }
}
