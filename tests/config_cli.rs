//! Configurations through the command line: what is refused, how, and what changes end to end.

mod common;

use common::Project;

const CONFIG: &str = r#"
[data]
format = "synthetic"
batch_size = 50
[data.synthetic]
samples = 500
eval_samples = 100
[model]
dense_features = 2
bottom_mlp = [8, 4]
interaction = "dot"
top_mlp = [8, 1]
[[table]]
name = "user"
rows = 40
dim = 4
[[table]]
name = "item"
rows = 60
dim = 4
[optimizer.sparse]
kind = "rowwise_adagrad"
lr = 0.05
[optimizer.dense]
kind = "adagrad"
lr = 0.05
"#;

#[test]
fn every_fault_is_on_standard_error_and_nothing_is_written() {
    let text = CONFIG
        .replace("batch_size = 50", "batch_size = 0\nbach_size = 50")
        .replace("samples = 500", "samples = 0")
        .replace("rows = 40", "rows = -40")
        .replace("kind = \"adagrad\"", "kind = \"adagrad\"\nbeta1 = 0.9");
    let project = Project::new(&text);
    for command in [
        "train config.toml --out run --set train.keep=0 --set table.7.rows=1",
        "eval config.toml --checkpoint run --set train.keep=0 --set table.7.rows=1",
        "data inspect config.toml --set train.keep=0 --set table.7.rows=1",
    ] {
        let ran = project.run(command);
        ran.says(
            2,
            &[
                "config.toml: 7 faults",
                "\n  data.batch_size: must be at least 1",
                "\n  data.bach_size: unknown key; did you mean `batch_size`?",
                "\n  data.synthetic.samples: must be at least 1",
                "\n  table.0.rows: expected a whole number from 0, found `-40`",
                "\n  optimizer.dense.beta1: optimizer adagrad does not take this option",
                "\n  train.keep: must be at least 1",
                "\n  table.7.rows: --set: no element `7`; the array has 2",
            ],
        );
        assert_eq!(ran.stdout, "");
        assert!(!project.path("run").exists(), "{command}");
    }
}

#[test]
fn assignments_reach_the_run_and_its_resolved_configuration() {
    let project = Project::new(CONFIG);
    project.ok("train config.toml --out run --set train.max_steps=9 --set train.max_steps=3 \
         --set data.batch_size=25 --set table.1.rows=7 --set optimizer.dense.kind=sgd \
         --set seed=11");
    let steps = project.steps("run");
    assert_eq!(steps.len(), 3);
    assert_eq!(steps[2].samples, 75);
    let text = std::fs::read_to_string(project.path("run/config.toml")).unwrap();
    let resolved: toml::Table = text.parse().unwrap();
    assert_eq!(resolved["seed"].as_integer(), Some(11));
    assert_eq!(resolved["train"]["max_steps"].as_integer(), Some(3));
    assert_eq!(resolved["table"][1]["rows"].as_integer(), Some(7));
    assert_eq!(resolved["optimizer"]["dense"]["kind"].as_str(), Some("sgd"));
    // Defaults are written out.
    assert_eq!(resolved["pipeline"]["micro_batches"].as_integer(), Some(1));
    assert_eq!(resolved["optimizer"]["sparse"]["eps"].as_float(), Some(1e-8));

    // The resolved configuration, from another folder, is the same run.
    std::fs::create_dir(project.path("elsewhere")).unwrap();
    std::fs::rename(project.path("run/config.toml"), project.path("elsewhere/c.toml")).unwrap();
    project.ok("train elsewhere/c.toml --out again");
    assert_eq!(project.steps("again"), steps);
    let again = std::fs::read_to_string(project.path("again/config.toml")).unwrap();
    assert_eq!(again, text);
}

#[test]
fn an_assignment_that_is_wrong_names_its_key() {
    let project = Project::new(CONFIG);
    for (set, part) in [
        ("nothing", "nothing: --set takes key=value"),
        ("train.epochs=many", "train.epochs: expected a whole number from 0, found `\"many\"`"),
        ("train.epochz=2", "train.epochz: unknown key; did you mean `epochs`?"),
        ("optimizer.sparse.momentum=0.9", "optimizer.sparse.momentum: optimizer rowwise_adagrad"),
        ("parallel.replicas=3", "parallel.replicas: 1 ranks cannot form 3 equal groups"),
        ("seed.x=1", "seed: expected a whole number"),
    ] {
        project.run(&format!("train config.toml --out run --set {set}")).says(2, &[part]);
    }
    assert!(!project.path("run").exists());
}

#[test]
fn a_folder_in_use_is_left_alone() {
    let project = Project::new(CONFIG);
    std::fs::create_dir(project.path("run")).unwrap();
    project.write("run/precious.txt", "do not touch");
    let before = project.snapshot("run");
    project.run("train config.toml --out run").says(2, &["run", "empty folder", "--resume"]);
    project.run("train config.toml --out config.toml").says(2, &["empty folder"]);
    assert_eq!(project.snapshot("run"), before);
    assert_eq!(std::fs::read_to_string(project.path("config.toml")).unwrap(), CONFIG);
}

#[test]
fn a_file_that_is_missing_or_not_toml_is_named() {
    let project = Project::new("[data\nformat = 1");
    project.run("train absent.toml --out run").says(2, &["cannot read absent.toml"]);
    project.run("train config.toml --out run").says(2, &["config.toml is not TOML", "line 1"]);
    project.run("train . --out run").says(2, &["cannot read ."]);
    std::fs::write(project.path("bytes.toml"), [0xFF, 0xFE, 0x00]).unwrap();
    project.run("train bytes.toml --out run").says(2, &["cannot read bytes.toml"]);
    assert!(!project.path("run").exists());
}

#[test]
fn paths_come_from_the_environment_and_the_folder_of_the_file() {
    let raw = CONFIG
        .replace(
            "format = \"synthetic\"",
            "format = \"raw\"\ntrain = \"${TESSERA_TEST_DATA}/t.raw\"",
        )
        .replace("[data.synthetic]\nsamples = 500\neval_samples = 100\n", "");
    let project = Project::new(CONFIG);
    std::fs::create_dir_all(project.path("sub/data")).unwrap();
    project.write("sub/raw.toml", &raw);
    project.ok("data synth config.toml --to raw --out sub/data/t.raw");

    let train = |value: Option<&str>, out: &str| {
        let mut command = project.command(&format!("train sub/raw.toml --out {out}"));
        command.env_remove("TESSERA_TEST_DATA");
        if let Some(value) = value {
            command.env("TESSERA_TEST_DATA", value);
        }
        let out = command.output().unwrap();
        (out.status.code(), String::from_utf8(out.stderr).unwrap())
    };
    let (code, stderr) = train(None, "a");
    assert_eq!(code, Some(2), "{stderr}");
    assert!(stderr.contains("data.train: ") && stderr.contains("no variable TESSERA_TEST_DATA"));
    // A relative value starts from sub/, not from where the program runs.
    let (code, stderr) = train(Some("data"), "b");
    assert_eq!(code, Some(0), "{stderr}");
    let (code, stderr) = train(Some("nowhere"), "c");
    assert_eq!(code, Some(1), "{stderr}");
    assert!(stderr.contains("sub/nowhere/t.raw"), "{stderr}");
    let resolved = std::fs::read_to_string(project.path("b/config.toml")).unwrap();
    let wanted = project.path("sub/data/t.raw").canonicalize().unwrap();
    assert!(resolved.contains(wanted.to_str().unwrap()), "{resolved}");
}

#[test]
fn help_is_there_for_every_command() {
    let project = Project::new(CONFIG);
    let help = project.ok("--help").stdout;
    for command in ["train", "eval", "predict", "export", "data", "doctor"] {
        assert!(help.contains(&format!("\n  {command} ")), "{help}");
        let own = project.ok(&format!("{command} --help")).stdout;
        assert!(own.contains(&format!("Usage: tessera {command}")), "{own}");
    }
    for command in ["synth", "convert", "inspect"] {
        let own = project.ok(&format!("data {command} --help")).stdout;
        assert!(own.contains(&format!("Usage: tessera data {command}")), "{own}");
    }
    let train = project.ok("train --help").stdout;
    for option in ["--set", "--init", "--resume", "--out"] {
        assert!(train.contains(option), "{train}");
    }
    assert!(project.ok("--version").stdout.contains(env!("CARGO_PKG_VERSION")));
    project.run("").says(2, &["Usage: tessera"]);
    project.run("trian config.toml").says(2, &["trian"]);
    project.run("train config.toml --colour red").says(2, &["--colour"]);
    project.run("train").says(2, &["<CONFIG>"]);
}
