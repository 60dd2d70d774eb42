"""First-step time of a patched 2-layer Mistral with empty caches: liger against liger_hw, each in a fresh process."""
import json,os,subprocess,sys,tempfile
CODE='''
import sys,time,torch,os
arm=sys.argv[1]
from transformers import MistralConfig, MistralForCausalLM
if arm=="liger":
    from liger_kernel.transformers import apply_liger_kernel_to_mistral as a; a()
elif arm=="liger_hw":
    from liger_hw.transformers import apply_liger_kernel_to_mistral as a; a()
c=MistralConfig(vocab_size=32768,hidden_size=4096,intermediate_size=14336,num_hidden_layers=2,num_attention_heads=32,num_key_value_heads=8)
torch.set_default_dtype(torch.bfloat16)
with torch.device("cuda"): m=MistralForCausalLM(c)
m.train(); x=torch.randint(0,32768,(1,2048),device="cuda")
torch.mm(torch.ones(64,64,device="cuda"),torch.ones(64,64,device="cuda")); torch.cuda.synchronize()
t=time.perf_counter(); m(input_ids=x,labels=x).loss.backward(); torch.cuda.synchronize(); a=time.perf_counter()-t
t=time.perf_counter(); m(input_ids=x,labels=x).loss.backward(); torch.cuda.synchronize(); print(a,time.perf_counter()-t)
'''
out={}
for arm in ("hf","liger","liger_hw"):
    with tempfile.TemporaryDirectory() as d:
        env={**os.environ,"TRITON_CACHE_DIR":d+"/t","LIGER_HW_CACHE_DIR":d+"/c"}
        r=subprocess.run([sys.executable,"-c",CODE,arm],env=env,capture_output=True,text=True)
        try: out[arm]=[float(v) for v in r.stdout.split()[-2:]]
        except Exception: print(arm, r.stderr[-300:])
print("first, second step s:",out); json.dump(out,open(os.environ["OUT"]+"/first_step.json","w"))
