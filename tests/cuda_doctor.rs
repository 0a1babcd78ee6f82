//! What `tessera doctor` says of NVIDIA's libraries on machines that lack one thing after another,
//! and that the program trains there. The cases with a driver are stand-ins (tests/emu), found by
//! the loader's path.

mod common;

use std::path::PathBuf;

use common::Project;
use tessera_device::cuda::testing::EXPECTED;

/// The folder with the stand-ins, where this test runs over them.
fn stand_ins() -> Option<PathBuf> {
    let path = std::env::var_os("LD_LIBRARY_PATH").unwrap_or_default();
    let found = std::env::split_paths(&path).find(|folder| {
        folder.join("libcuda.so.1").exists() && folder.join("../driver-only").exists()
    });
    assert!(
        found.is_some() || std::env::var_os(EXPECTED).is_none(),
        "{EXPECTED} is set, but LD_LIBRARY_PATH has no stand-ins"
    );
    if found.is_none() {
        eprintln!("skipped: the stand-ins for NVIDIA's libraries are not in LD_LIBRARY_PATH");
    }
    found
}

/// A run of two steps.
const CONFIG: &str = r#"
[data]
format = "synthetic"
batch_size = 16
synthetic = { samples = 32, eval_samples = 16 }
[model]
dense_features = 2
bottom_mlp = [8, 4]
interaction = "dot"
top_mlp = [8, 1]
[[table]]
name = "user"
rows = 40
dim = 4
[optimizer.sparse]
kind = "rowwise_adagrad"
lr = 0.05
[optimizer.dense]
kind = "adagrad"
lr = 0.05
"#;

/// Subject, whether it can be used, and what is said about it.
type Findings = Vec<(String, bool, String)>;

/// What the program says of a machine that has these libraries. It trains there all the same.
fn doctor(libraries: Option<PathBuf>, env: &[(&str, &str)]) -> Findings {
    let project = Project::new(CONFIG);
    let run = |line: &str| {
        let mut command = project.command(line);
        command.env_remove("LD_LIBRARY_PATH").envs(env.iter().copied());
        if let Some(libraries) = &libraries {
            command.env("LD_LIBRARY_PATH", libraries);
        }
        let output = command.output().unwrap();
        let errors = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(output.status.success(), "{}: {errors}", output.status);
        (output.stdout, errors)
    };
    let (told, errors) = run("doctor --json");
    assert_eq!(errors, "");
    let report: serde_json::Value = serde_json::from_slice(&told).unwrap();
    let text = |finding: &serde_json::Value, key| finding[key].as_str().unwrap().to_owned();
    let findings = report["findings"].as_array().unwrap().iter();
    let findings = findings.map(|finding| {
        let usable = finding["usable"].as_bool().unwrap();
        (text(finding, "subject"), usable, text(finding, "detail"))
    });
    run("train config.toml --out run");
    let summary = project.summary("run");
    assert_eq!((&summary["device"], &summary["steps"]), (&"cpu".into(), &2.into()));
    findings.collect()
}

#[track_caller]
fn says(findings: &Findings, subject: &str, usable: bool, words: &[&str]) {
    let found: Vec<_> = findings.iter().filter(|finding| finding.0 == subject).collect();
    assert!(!found.is_empty(), "nothing about {subject}: {findings:?}");
    let fits = |finding: &&(String, bool, String)| {
        finding.1 == usable && words.iter().all(|word| finding.2.contains(word))
    };
    assert!(found.iter().any(fits), "{words:?} is not said: {found:?}");
}

/// On a machine with a GPU, this test would find it.
fn real_driver() -> bool {
    doctor(None, &[]).iter().any(|finding| finding.0 == "nvidia driver" && finding.1)
}

#[test]
fn without_any_library_it_says_what_to_install() {
    if real_driver() {
        return;
    }
    let findings = doctor(None, &[]);
    for subject in ["cpu", "simd", "memory", "io_uring", "mpi"] {
        assert!(findings.iter().any(|finding| finding.0 == subject), "{findings:?}");
    }
    says(&findings, "nvidia driver", false, &["libcuda.so.1 cannot be loaded", "install"]);
    says(&findings, "gpu kernels", false, &["no NVIDIA driver"]);
    says(&findings, "nvrtc", false, &["pip install nvidia-cuda-nvrtc-cu12"]);
    says(&findings, "cublaslt", false, &["pip install nvidia-cublas-cu12"]);
    says(&findings, "nccl", false, &["pip install nvidia-nccl-cu12"]);
}

#[test]
fn with_driver_and_compiler_it_lists_the_gpus() {
    let Some(libraries) = stand_ins() else { return };
    let env = [("TESSERA_EMU_DEVICES", "2"), ("TESSERA_EMU_MEMORY_BYTES", "3221225472")];
    let findings = doctor(Some(libraries), &env);
    says(&findings, "nvidia driver", true, &["CUDA 12.8", "libcuda.so.1", "2 GPUs"]);
    for ordinal in ["0: ", "1: "] {
        says(&findings, "gpu", true, &[ordinal, "stand-in", "capability 9.0", "3.0 GiB"]);
    }
    says(&findings, "nvrtc", true, &["NVRTC 12.8", "libnvrtc.so.12"]);
    says(&findings, "gpu kernels", true, &[]);
}

#[test]
fn a_driver_without_device_is_told_apart() {
    let Some(libraries) = stand_ins() else { return };
    let findings = doctor(Some(libraries), &[("TESSERA_EMU_DEVICES", "0")]);
    says(&findings, "nvidia driver", false, &["shows no GPU", "CUDA_VISIBLE_DEVICES"]);
    says(&findings, "gpu kernels", false, &["shows no GPU"]);
    assert!(findings.iter().all(|finding| finding.0 != "gpu"));
}

#[test]
fn an_old_driver_is_told_with_what_is_needed() {
    let Some(libraries) = stand_ins() else { return };
    let findings = doctor(Some(libraries), &[("TESSERA_EMU_DRIVER", "11040")]);
    says(&findings, "nvidia driver", false, &["of CUDA 11.4", "12.4 is needed", "550"]);
}

#[test]
fn a_driver_that_does_not_start_is_told_with_its_words() {
    let Some(libraries) = stand_ins() else { return };
    let findings = doctor(Some(libraries), &[("TESSERA_EMU_FAIL", "cuInit:1:719")]);
    let words = ["does not start: 719 (CUDA_ERROR_LAUNCH_FAILED)", "nvidia-smi"];
    says(&findings, "nvidia driver", false, &words);
}

#[test]
fn without_the_compiler_it_says_what_to_install() {
    let Some(libraries) = stand_ins() else { return };
    let libraries = libraries.join("../driver-only");
    let findings = doctor(Some(libraries), &[("TESSERA_EMU_DEVICES", "1")]);
    says(&findings, "nvidia driver", true, &["1 GPU"]);
    says(&findings, "nvrtc", false, &["pip install nvidia-cuda-nvrtc-cu12"]);
    says(&findings, "gpu kernels", false, &["no NVRTC"]);
    says(&findings, "nccl", false, &["libnccl.so.2", "pip install nvidia-nccl-cu12"]);
}
